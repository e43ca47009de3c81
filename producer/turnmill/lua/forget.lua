-- FORGET: stored answers are dropped on purpose. ARGV: run, then per turn: hash, SHA-1 (hex) of the stored
-- record that is meant (the reply; else the failure's record; else nothing; '': whatever is there), so that
-- a call that is repeated after its answer was lost drops nothing newer.
--   a run     lets go of these turns, and what nobody else holds is dropped
--   ''        these answers are dropped, whoever holds them; who asks again is counted again
--   no turns  what the run leaves behind is removed, if it has let go of all its turns
-- Returns per turn: 1 an answer was dropped; 2 the run has let go, without that; 0 nothing was done: the
-- turn is open, or not this run's, or its record is another one. Without turns: 1 or 0.
local run = ARGV[1]
-- Asked first: a script that is refused half way is not undone.
if not redis.acl_check_cmd('DEL', reply_key('')) then
  return redis.error_reply('NOPERM this user may not drop replies')
end
if #ARGV == 1 then return forget_rest(run) end
local TURNS, SWEEP = Q .. 'turns:' .. run, Q .. 'sweep:' .. run

local function is_meant(h, sha)
  if sha == '' then return true end
  return redis.sha1hex(C('GET', reply_key(h)) or C('HGET', failure_key(h), 'record') or '') == sha
end

local function withdraw(h)
  if not ended(h) or leased(h) then return 0 end
  C('PERSIST', reply_key(h))  -- changes nothing; who may not remove the reply is refused before anything is done
  for _, holder in ipairs(C('HKEYS', waiters_key(h))) do let_go(Q, h, holder) end
  drop(h)
  return 1
end

local function release(h)
  local swept = C('SISMEMBER', SWEEP, h) == 1
  if not swept and C('SISMEMBER', TURNS, h) == 0 then return 0 end
  if ended(h) then
    let_go(Q, h, run)
    return not wanted(h) and drop(h) and 1 or 2
  end
  if not swept and C('HEXISTS', waiters_key(h), run) == 1 then return 0 end
  local held = let_go(Q, h, run)
  if not leased(h) then  -- else RENEW tells its worker, if nobody is left
    if not wanted(h) then forget_open(h); drop(h)
    elseif held then requeue(h) end
  end
  return 2
end

local results = {}
for i = 2, #ARGV, 2 do
  local h = ARGV[i]
  local done = 0
  if is_meant(h, ARGV[i + 1]) then done = run == '' and withdraw(h) or run ~= '' and release(h) end
  results[#results + 1] = done
end
return results
