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
LC_ALL=C # so that BYTES are bytes
exec 3<&0 4>&1 < /dev/null > /dev/null 2>&1
cd -- "$work" || exit
set -m # each command is a process group
trap : PIPE # when nobody reads any more, there is still something to do at the end
[ -z "$root" ] || export TURNMILL_SANDBOX=$root

cat > "$folder/shell" <<'END'
_vanillux_state=$2 _vanillux_work=$3 _vanillux_command=$(< "$4")
{
  ulimit -c 0
  [ "$5" = 0 ] || ulimit -u "$5"
  [ "$6" = 0 ] || ulimit -d "$6"
  echo 1000 > /proc/self/oom_score_adj
  if [ -r "$_vanillux_state" ]; then
    for _vanillux_name in $(compgen -e); do unset -v "$_vanillux_name"; done
    . "$_vanillux_state"
  fi
} 2> /dev/null
set --
_vanillux_keep() {
  {
    export -p
    printf 'cd -- %q || cd -- %q\n' "$PWD" "$_vanillux_work"
  } > "$_vanillux_state.new" && command mv -f -- "$_vanillux_state.new" "$_vanillux_state"
} 2> /dev/null
trap _vanillux_keep EXIT
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
      IFS= read -r -N "$bytes" command <&3
      printf '%s' "$command" > "$folder/command"
      answer "$id" begin
      bash --noprofile --norc -c '. "$1"; eval "$_vanillux_command"; set -- $?; _vanillux_keep; exit "$1"' \
        bash "$folder/shell" "$folder/$name" "$work" "$folder/command" "$processes" "$memory" >&4 2>&4 3<&- 4>&- &
      await $!
      answer "$id" $?
      ;;
    put)
      answer "$id" begin
      head -c "$bytes" <&3 | tar -x -o -f - -C "$work" >&4 2>&4
      answer "$id" $?
      ;;
  esac
done

if [ -n "$root" ]; then
  cd /
  for process in /proc/[0-9]*; do
    grep -qsz "^TURNMILL_SANDBOX=$root\$" "$process/environ" && kill -KILL "${process#/proc/}"
  done
  rm -rf -- "$root"
fi
