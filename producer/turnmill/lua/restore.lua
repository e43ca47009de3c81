-- RESTORE: turns of a run come back from an archive. ARGV: run, weight, then per turn: hash, body, reply, trace,
-- failure's kind and record, waiter, how it left, number of earlier failures, and those. '' is: none.
-- An answer that is there wins, and a reply over a failure. Returns how many answers were stored.
-- Asked first: a script that is refused half way is not undone.
if not redis.acl_check_cmd('SET', reply_key(''), '') then
  return redis.error_reply('NOPERM this user may not write replies')
end
local run, weight = ARGV[1], ARGV[2]
local TURNS = Q .. 'turns:' .. run
local stored, total = 0, 0
local counted = { done = 0, failed = 0, cancelled = 0 }

-- As FINISH: who waits for the turn by now has its answer.
local function answer(h, reply, trace)
  C('SET', reply_key(h), reply)
  if trace ~= '' then C('SET', trace_key(h), trace) end
  count(h, 'done', 1)
  if C('EXISTS', failure_key(h)) == 1 then
    count(h, 'failed', -1)
    C('DEL', failure_key(h))
  end
  C('DEL', tries_key(h), partial_key(h), told_key(h))
  C('ZREM', SUSPECTS, h)
  C('ZREM', DUE, h)
  C('ZREM', LEASES, h)
  C('HDEL', OWNERS, h)
  publish(h)
  stored = stored + 1
end

local function bring_back(h, body, reply, trace, kind, record, waiter, left, earlier)
  local new = C('EXISTS', body_key(h), reply_key(h), failure_key(h)) == 0
  if reply ~= '' and C('EXISTS', reply_key(h)) == 0 then
    answer(h, reply, trace)
  elseif kind ~= '' and new then
    C('HSET', failure_key(h), 'kind', kind, 'record', record)
    if trace ~= '' then C('SET', trace_key(h), trace) end
    stored = stored + 1
  end
  if new and ended(h) then
    if body ~= '' then C('SET', body_key(h), body) end
    if #earlier > 0 then C('RPUSH', N .. 'y:' .. h, unpack(earlier)) end
  end
  if C('SISMEMBER', Q .. 'sweep:' .. run, h) == 1 or C('SADD', TURNS, h) == 0 then return end  -- the run has it
  total = total + 1
  if waiter ~= '' then
    C('HSET', waiters_key(h), run, waiter)
    if C('EXISTS', reply_key(h)) == 1 then counted.done = counted.done + 1
    elseif C('EXISTS', failure_key(h)) == 1 then counted.failed = counted.failed + 1 end
  elseif left ~= '' then
    C('HSET', leavers_key(h), run, left)
    local field = left == 'cancelled' and 'cancelled' or 'failed'
    counted[field] = counted[field] + 1
  end
end

C('SADD', N .. 'runs', run)
C('SADD', N .. 'models', Q)
C('HSETNX', run_key(run), 'weight', weight)
local i = 3
while i <= #ARGV do
  local earlier = {}
  for k = 1, tonumber(ARGV[i + 8]) do earlier[k] = ARGV[i + 8 + k] end
  bring_back(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6], ARGV[i + 7], earlier)
  i = i + 9 + #earlier
end
if total > 0 then C('HINCRBY', run_key(run), 'total', total) end
for field, amount in pairs(counted) do
  if amount > 0 then C('HINCRBY', run_key(run), field, amount) end
end
return stored
