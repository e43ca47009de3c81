-- TEND: turns of one model that were asked for outside a run, and upkeep of all such turns of the model.
-- ARGV: ms after which a turn that nobody waits for is cancelled, ms for which an ended one is kept, then per turn:
-- hash, lane, `held` (somebody waits for it now) or `spent` (nobody will any more).
-- Returns: how many were cancelled, how many were let go. At most a hundred each: call again at once then.
local patience, keep = tonumber(ARGV[1]), tonumber(ARGV[2])
-- Asked first: a script that is refused half way is not undone.
if not redis.acl_check_cmd('DEL', reply_key('')) then
  return redis.error_reply('NOPERM this user may not drop replies')
end
local HELD, SPENT, TENDED = Q .. 'held', Q .. 'spent', Q .. 'tended'
-- Since when this is called again and again. If it was not for a while, nobody could say that he waits (Redis stood still,
-- or was away): nothing is cancelled until all have had the time to say so.
local unbroken = math.floor(patience / 2)
C('SET', TENDED, now, 'NX')
C('PEXPIRE', TENDED, unbroken)
local heard = now - C('GET', TENDED) >= unbroken

for i = 3, #ARGV, 3 do
  local turn, held = ARGV[i] .. ARGV[i + 1], ARGV[i + 2] == 'held'
  C('ZADD', held and HELD or SPENT, now, turn)
  C('ZREM', held and SPENT or HELD, turn)
end

local function each_older_than(age, key, do_it)
  local turns = C('ZRANGEBYSCORE', key, '-inf', now - age, 'LIMIT', 0, 100)
  for _, turn in ipairs(turns) do
    C('ZREM', key, turn)
    do_it(turn:sub(1, 64), turn:sub(65))
  end
  return #turns
end

local cancelled = heard and each_older_than(patience, HELD, function(h, lane)
  leave(h, lane, 'cancelled')
  C('ZADD', SPENT, now, h .. lane)
end) or 0

local gone = each_older_than(keep, SPENT, function(h, lane)
  if not ended(h) and C('HEXISTS', waiters_key(h), lane) == 1 then return end  -- it is waited for again
  let_go(Q, h, lane)
  if wanted(h) or leased(h) then return end
  if not ended(h) then forget_open(h) end
  drop(h)
end)
return { cancelled, gone }
