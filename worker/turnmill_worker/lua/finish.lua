-- FINISH: how turns ended in a worker. ARGV, six per turn: hash, token, then one of
--   ok         ''     reply        trace      the first answer wins, whoever brings it; but once readers were told
--                                             of an answer, only the owner's goes on from there
--   fail       kind   record       trace      only by the owner
--   requeue    ms     reason       ''         only by the owner; ms: not before that; reason: drain, handback,
--                                             retry (no strike) or death (a strike)
--   cancelled  ''     ''           ''         only by the owner: it was told that nobody wants it
-- Returns per turn: 1 done, 0 not (somebody else's by now, or ended), -1 refused by an error of its own.
local hashes = {}
for i = 1, #ARGV, 6 do hashes[#hashes + 1] = ARGV[i] end
local owners = C('HMGET', OWNERS, unpack(hashes))
local done_of, failed_of, answered, new, records = {}, {}, {}, {}, {}
local replies, bytes = 0, 0

-- New replies and traces are written together: a command for each would take twice as long.
local function write_records()
  if #records > 0 then C('MSET', unpack(records)) end
  records = {}
end

local function store_reply(i, h, token, reply, trace)
  local known = C('EXISTS', reply_key(h), failure_key(h), tries_key(h)) > 0
  local over = new[h] or known and C('EXISTS', reply_key(h)) == 1
  if known and not over and C('EXISTS', told_key(h)) == 1 and not (owners[i] and token_of(owners[i]) == token) then
    return 0
  end
  answered[#answered + 1] = h
  if over then return 0 end
  local runs, had_failed, last = C('HKEYS', waiters_key(h)), 0, #records
  new[h] = true
  records[last + 1], records[last + 2], records[last + 3], records[last + 4] = reply_key(h), reply, trace_key(h), trace
  replies, bytes = replies + 1, bytes + #reply + #trace
  if known then
    had_failed = C('DEL', failure_key(h))
    C('DEL', tries_key(h), partial_key(h), told_key(h))
    C('ZREM', SUSPECTS, h)
  end
  for _, run in ipairs(runs) do
    done_of[run] = (done_of[run] or 0) + 1
    failed_of[run] = (failed_of[run] or 0) - had_failed
  end
  publish(h)
  return 1
end

local function release(h, owner, verb, a, b, trace)
  C('HDEL', OWNERS, h)
  C('ZREM', LEASES, h)
  if ended(h) then return 0 end
  if verb == 'fail' then
    C('SET', trace_key(h), trace)
    fail(h, a, b)
  elseif not wanted(h) then
    forget_open(h)
    publish(h)
  elseif verb == 'cancelled' then  -- somebody came back for it
    requeue(h, run_of(owner))
  else
    note_try(h, owner, b)
    if not (b == 'death' and strike(h, owner)) then
      if tonumber(a) > 0 then C('ZADD', DUE, now + tonumber(a), h) else requeue(h, run_of(owner)) end
    end
  end
  return 1
end

local function finish(i, h, token, verb, a, b, trace)
  if verb == 'ok' then return store_reply(i, h, token, b, trace) end
  write_records()
  local owner = owners[i]
  if not owner or token_of(owner) ~= token or C('HGET', OWNERS, h) ~= owner then return 0 end
  return release(h, owner, verb, a, b, trace)
end

local results = {}
for i, h in ipairs(hashes) do
  local k = 6 * i - 5
  local fine, result = pcall(finish, i, h, ARGV[k + 1], ARGV[k + 2], ARGV[k + 3], ARGV[k + 4], ARGV[k + 5])
  results[i] = fine and result or -1
end
write_records()
if #answered > 0 then
  C('HDEL', OWNERS, unpack(answered))
  C('ZREM', LEASES, unpack(answered))
  if replies > 0 then
    C('HINCRBY', Q .. 'stored', 'replies', replies)
    C('HINCRBY', Q .. 'stored', 'bytes', bytes)
  end
end
for run, amount in pairs(done_of) do
  C('HINCRBY', run_key(run), 'done', amount)
  if failed_of[run] ~= 0 then C('HINCRBY', run_key(run), 'failed', failed_of[run]) end
end
return results
