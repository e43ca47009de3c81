# Runs commands inside a sandbox, one after the other, until its standard input ends. sandbox.py starts it and speaks with it.
#
# $1: a folder for its own files; $2: WORK, where commands begin; $3: the ID under which it answers once it is ready; $4, $5: processes, and KiB of
# memory of each, that a command may have (0: any number); $6: a folder to remove at the end, where nothing else ends what was started.
#
# It is asked   run ID BYTES SHELL\n and so many bytes: a command, in the SHELL of this name, which remembers `cd` and `export`;
#               put ID BYTES\n and so many bytes: a tar file for WORK;
#               one more byte, while something runs: kill it.
# It answers    \nID begin\n, what was printed, and \nID CODE\n.
#
# A command has a bash of its own, so neither `exit` nor a signal ends the sandbox. It is over when that bash is, whatever it
# leaves running. This script may be process 1, which no signal from inside the sandbox ends.

readonly folder=$1 work=$2 processes=$4 memory=$5 root=$6
mv=$(type -P mv) # a command may leave another PATH
export -n LC_ALL
LC_ALL=C # so that BYTES are bytes
exec 3<&0 4>&1 < /dev/null > /dev/null 2>&1
cd -- "$work" || exit
ulimit -S -n 1024 # whatever the producer needs itself
set -m # each command is a process group
trap : PIPE # when nobody reads any more, there is still something to do at the end
[ -z "$root" ] || export TURNMILL_SANDBOX=$root

# What the bash of a command does: `kept` is the file with what its shell remembers. No file but this one and the command is read, for
# what else lies there, an earlier command may have changed.
read -r -d '' shell <<'END'
_vanillux_kept=$1 _vanillux_work=$2 _vanillux_command=$(< "$3") _vanillux_mv=$6
{
  ulimit -c 0
  [ "$4" = 0 ] || ulimit -u "$4"
  [ "$5" = 0 ] || ulimit -d "$5"
  echo 1000 > /proc/self/oom_score_adj
  if [ -r "$_vanillux_kept" ]; then
    for _vanillux_name in $(compgen -e); do unset -v "$_vanillux_name"; done
    . "$_vanillux_kept"
  fi
} 2> /dev/null
set --
_vanillux_keep() {
  [ "$_vanillux_kept" ] && {
    builtin export -p &&
      builtin printf 'cd -- %q || cd -- %q\n' "$PWD" "$_vanillux_work" &&
      builtin printf 'OLDPWD=%q\n' "${OLDPWD-$PWD}"
  } > "$_vanillux_kept.new" && "$_vanillux_mv" -f -- "$_vanillux_kept.new" "$_vanillux_kept"
  _vanillux_kept=
}
trap '{ _vanillux_keep; } 2> /dev/null' EXIT
{ # as one: nothing is left to be read after the command, whatever it has set, or left open
  eval -- "$_vanillux_command"
  { # no output of the command, though it may have set -v, -x, or a trap
    set -- $?
    set +vx
    trap - DEBUG
    _vanillux_keep # the command may have set another trap for the end
  } > /dev/null 2>&1
  exit "$1"
}
END

answer() { printf '\n%s %s\n' "$1" "$2" >&4; }

# The exit code of the job $1, which is killed when a byte comes, or standard input ends.
await() {
  local job=$1 ear code
  { IFS= read -r -n 1 _ <&3; } &
  ear=$!
  wait -n "$job" "$ear"
  kill -0 "$job" && kill -KILL -- "-$job"
  wait "$job"
  code=$?
  kill -KILL "$ear"
  wait "$ear"
  return "$code"
}

answer "$3" begin
answer "$3" 0
while read -r verb id bytes name <&3; do
  case $verb in
    run)
      IFS= read -r -N "$bytes" command <&3 || break # half a command is none
      answer "$id" begin
      if printf '%s' "$command" > "$folder/command"; then
        bash --noprofile --norc -c "$shell" \
          bash "$folder/$name" "$work" "$folder/command" "$processes" "$memory" "$mv" >&4 2>&4 3<&- 4>&- &
        await $!
      else
        echo "bash: no space left for the command" >&4
        false
      fi
      answer "$id" $?
      ;;
    put)
      answer "$id" begin
      # All is read, whatever becomes of it: what follows is the next request.
      head -c "$bytes" <&3 | {
        tar -x -o -f - -C "$work" >&4 2>&4
        code=$?
        cat
        exit "$code"
      }
      answer "$id" $?
      ;;
  esac
done

if [ -n "$root" ]; then
  cd /
  # Again, for what is met may just have started another.
  for round in 1 2 3 4 5; do
    found=$(TURNMILL_SANDBOX='' grep -lsz "^TURNMILL_SANDBOX=$root\$" /proc/[0-9]*/environ)
    [ -n "$found" ] || break
    for process in $found; do
      process=${process#/proc/}
      kill -KILL "${process%/environ}"
    done
  done
  rm -rf -- "$root"
fi
