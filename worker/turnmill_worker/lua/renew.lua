-- RENEW: a worker lives and goes on. ARGV: per turn: hash, token.
-- Returns: {lost: somebody else holds it, or it has ended}, {unwanted: nobody waits for it any more},
-- again (1: more upkeep is to be done, call at once), {stream: somebody reads along, since lately}.
local hashes, tokens = {}, {}
for i = 1, #ARGV, 2 do
  hashes[#hashes + 1] = ARGV[i]
  tokens[#tokens + 1] = ARGV[i + 1]
end
local lost, unwanted, renewed = {}, {}, {}

-- A run that is being cancelled leaves what runs before what waits.
local leaving = {}
for _, run in ipairs(C('SMEMBERS', Q .. 'sweeping')) do leaving[run] = true end
local function leave_early(h)
  for _, run in ipairs(next(leaving) and C('HKEYS', waiters_key(h)) or {}) do
    if leaving[run] and C('SREM', Q .. 'sweep:' .. run, h) == 1 then
      C('SADD', Q .. 'turns:' .. run, h)
      leave(h, run, 'cancelled')
    end
  end
end

if #hashes > 0 then
  local owners, scores = C('HMGET', OWNERS, unpack(hashes)), C('ZMSCORE', LEASES, unpack(hashes))
  for i, h in ipairs(hashes) do
    local owner = owners[i]
    if not owner or token_of(owner) ~= tokens[i] or (not scores[i] and ended(h)) then
      lost[#lost + 1] = h
    else
      -- Lapsed, but nobody has taken it: it is alive after all, and the strike was unjust.
      if not scores[i] and C('EXISTS', tries_key(h)) == 1 and strikes(h) > 0 then
        C('HINCRBY', tries_key(h), 'strikes', -1)
        C('ZREM', SUSPECTS, h)
      end
      renewed[#renewed + 1] = now + lease
      renewed[#renewed + 1] = h
    end
  end
  if #renewed > 0 then C('ZADD', LEASES, unpack(renewed)) end
  for i = 2, #renewed, 2 do
    leave_early(renewed[i])
    if not wanted(renewed[i]) then unwanted[#unwanted + 1] = renewed[i] end
  end
end

-- Upkeep of the queue, after the own renewals: whoever is alive does it.
local again = reap()

local late = C('ZRANGEBYSCORE', Q .. 'deadlines', '-inf', now, 'LIMIT', 0, 100)
for _, entry in ipairs(late) do
  C('ZREM', Q .. 'deadlines', entry)
  leave(entry:sub(1, 64), entry:sub(65), 'deadline')
end

local run = C('SRANDMEMBER', Q .. 'sweeping')
if run then
  local SWEEP = Q .. 'sweep:' .. run
  for _, h in ipairs(C('SPOP', SWEEP, 200)) do
    C('SADD', Q .. 'turns:' .. run, h)
    leave(h, run, 'cancelled')
  end
  if C('EXISTS', SWEEP) == 0 then C('SREM', Q .. 'sweeping', run) end
end
if forget_over() or again or #late == 100 or C('EXISTS', Q .. 'sweeping') == 1 then again = 1 else again = 0 end
local stream = #tokens > 0 and C('SMEMBERS', asked_key(tokens[1]:sub(1, 8))) or {}
return { lost, unwanted, again, stream }
