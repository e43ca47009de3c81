-- How runs let go of turns, for FORGET and RENEW. q is the prefix of the turn's queue, which need not be Q.

-- A run lets go of a turn: nothing says any more that it was asked. Returns whether the run held it.
local function let_go(q, h, run)
  local known = C('SREM', q .. 'turns:' .. run, h) + C('SREM', q .. 'sweep:' .. run, h)
  local held, how = C('HDEL', waiters_key(h), run) == 1, C('HGET', leavers_key(h), run)
  local counted
  if held then
    counted = C('EXISTS', reply_key(h)) == 1 and 'done' or C('EXISTS', failure_key(h)) == 1 and 'failed'
  elseif how then
    C('HDEL', leavers_key(h), run)
    counted = how == 'cancelled' and 'cancelled' or 'failed'
  end
  C('ZREM', q .. 'deadlines', h .. run)
  if counted then C('HINCRBY', run_key(run), counted, -1) end
  if known > 0 then C('HINCRBY', run_key(run), 'total', -1) end
  return held
end

-- Nobody holds this turn: nothing of it stays. Returns whether there was an answer.
local function drop(h)
  local answers = C('DEL', reply_key(h), failure_key(h))
  C('DEL', body_key(h), trace_key(h), tries_key(h), partial_key(h), told_key(h), N .. 'y:' .. h)
  return answers > 0
end

-- What a run leaves behind when it has let go of all its turns. Returns 0 if it has some left.
local function forget_rest(run)
  local queues = C('SMEMBERS', N .. 'models')
  for _, q in ipairs(queues) do
    if C('EXISTS', q .. 'turns:' .. run, q .. 'sweep:' .. run) > 0 then return 0 end
  end
  for _, q in ipairs(queues) do
    -- Only stale hints are left: a turn that others want got a new one when this run left it.
    for class = 0, 9 do
      C('UNLINK', q .. 'going:' .. class .. ':' .. run, q .. 'new:' .. class .. ':' .. run)
      C('ZREM', q .. 'ready:' .. class, run)
      C('HDEL', q .. 'vt', class .. run)
    end
    C('SREM', q .. 'sweeping', run)
  end
  for _, attempt in ipairs(C('SMEMBERS', N .. 'attempts:' .. run)) do
    local named = run .. ':' .. attempt
    C('UNLINK', N .. 'attempt:' .. named, N .. 'draws:' .. named)
  end
  C('UNLINK', run_key(run), N .. 'manifest:' .. run, N .. 'journal:' .. run, N .. 'engines:' .. run, N .. 'attempts:' .. run)
  C('ZREM', N .. 'expiring', run)
  C('SREM', N .. 'runs', run)
  return 1
end

-- Forget, a batch at a time, a run whose time is up (`--keep`). Returns whether there may be more to do.
local function forget_over()
  local run = C('ZRANGEBYSCORE', N .. 'expiring', '-inf', now, 'LIMIT', 0, 1)[1]
  if not run then return false end
  -- Somebody drives it again or archives it, or turns that were cancelled are not cleared yet: look again later.
  local function later() C('ZADD', N .. 'expiring', now + 60000, run) end
  if C('EXISTS', N .. 'producer:' .. run) == 1 then
    later()
    return true
  end
  for _, q in ipairs(C('SMEMBERS', N .. 'models')) do
    local some = C('SRANDMEMBER', q .. 'turns:' .. run, 100)
    for _, h in ipairs(some) do
      if not ended(h) and C('HEXISTS', waiters_key(h), run) == 1 then
        C('ZREM', N .. 'expiring', run)  -- it waits for an answer: it is not over
        return true
      end
      let_go(q, h, run)
      if not wanted(h) then drop(h) end
    end
    if #some > 0 then return true end
  end
  if forget_rest(run) == 0 then later() end
  return true
end
