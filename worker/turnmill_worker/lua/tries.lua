-- How tries end, for the scripts of workers.
-- An owner is: token (24), a mark (1), the run it was charged to. mark: '-' any company, '~' on trial
-- among suspects, '!' on trial alone.
local lease = tonumber(C('GET', N .. 'lease') or 10000)

local function token_of(owner) return owner:sub(1, 24) end
local function mark_of(owner) return owner:sub(25, 25) end
local function run_of(owner) return owner:sub(26) end

-- The try is over without an answer; the next worker's trace will say so.
local function note_try(h, owner, outcome)
  local line = cjson.encode({ worker = owner:sub(1, 8), outcome = outcome, at = now / 1000 })
  local log = C('HGET', tries_key(h), 'log')
  C('HSET', tries_key(h), 'log', log and #log < 8000 and (log .. ',' .. line) or line)
  C('HINCRBY', tries_key(h), 'tries', 1)
end

-- The turn ends as a failure, unless it has a reply: a reply is never replaced by a failure.
local function fail(h, kind, record)
  if C('EXISTS', reply_key(h)) == 1 then return false end
  if C('EXISTS', failure_key(h)) == 0 then count(h, 'failed', 1) end
  C('HSET', failure_key(h), 'kind', kind, 'record', record)
  C('DEL', tries_key(h), partial_key(h), told_key(h))
  C('ZREM', SUSPECTS, h)
  C('HDEL', OWNERS, h)
  publish(h)
  return true
end

-- Suspects: a death accuses the turns that were on trial in its worker, or, if none were, all that it held. From
-- the second strike on a turn is a suspect, whose next company is at most a quarter of those it was accused with: a
-- hundred that die together say little of each. Convicted is who is accused alone, of its fifth death at the least.
local CONVICTED_FROM = 5  -- strikes

local function trial_key(worker) return Q .. 'trial:' .. worker end

-- The largest company that a suspect may have, itself included.
local function company_of(h) return tonumber(C('HGET', tries_key(h), 'company') or 1) end

-- The set of those that the death of a worker accuses; `h` is one that it held. Written down when the first of
-- them comes back, because their leases do not lapse at one moment.
local function accused_with(h, worker)
  local ACCUSED = Q .. 'accused:' .. worker
  if C('EXISTS', ACCUSED) == 1 then return ACCUSED end
  local held, tried = { h }, C('SISMEMBER', trial_key(worker), h) == 1 and { h } or {}
  local entries = C('HGETALL', OWNERS)
  for i = 1, #entries, 2 do
    if entries[i + 1]:sub(1, 8) == worker then
      held[#held + 1] = entries[i]
      if C('SISMEMBER', trial_key(worker), entries[i]) == 1 then tried[#tried + 1] = entries[i] end
    end
  end
  if #tried > 0 then held = tried end
  for i = 1, #held, 1000 do
    C('SADD', ACCUSED, unpack(held, i, math.min(#held, i + 999)))
  end
  C('PEXPIRE', ACCUSED, 2 * lease)
  return ACCUSED
end

-- The try ended with the death or silence of its worker. Returns true if that convicts the turn.
local function strike(h, owner)
  if C('HGET', tries_key(h), 'keeper') == token_of(owner) then return false end  -- it got the turn further
  local ACCUSED = accused_with(h, owner:sub(1, 8))
  if C('SISMEMBER', ACCUSED, h) == 0 then return false end
  local struck, together = C('HINCRBY', tries_key(h), 'strikes', 1), C('SCARD', ACCUSED)
  if struck < CONVICTED_FROM or mark_of(owner) ~= '!' or together > 1 then
    if struck >= SUSPECT_FROM then
      local before = tonumber(C('HGET', tries_key(h), 'company') or together)
      C('HSET', tries_key(h), 'company', math.max(1, math.floor(math.min(before, together / 4))))
    end
    return false
  end
  local tries, log = tonumber(C('HGET', tries_key(h), 'tries')), C('HGET', tries_key(h), 'log')
  C('SET', trace_key(h), '{"v":1,"hash":"' .. h .. '","worker":"' .. owner:sub(1, 8)
    .. '","outcome":"failed","earlier":[' .. log .. ']}')
  fail(h, 'poison', cjson.encode({ v = 1, hash = h, kind = 'poison', tries = tries,
    text = 'its worker died while it had nothing else to answer; tries in all: ' .. tries }))
  return true
end

-- Reap at most 100 lapsed leases. After an outage (nobody has called for half a lease, or the clock went
-- back) nobody could renew, so nobody is struck: every lease gets its full length again.
-- Returns whether there are more to reap.
local function reap()
  local seen = tonumber(C('GET', Q .. 'seen') or now)
  C('SET', Q .. 'seen', now)
  if now < seen or now - seen > lease / 2 then
    local held = C('ZRANGE', LEASES, 0, -1)
    for i = 1, #held, 1000 do
      local args = {}
      for j = i, math.min(#held, i + 999) do
        args[#args + 1] = now + lease
        args[#args + 1] = held[j]
      end
      if now < seen then C('ZADD', LEASES, 'XX', unpack(args))
      else C('ZADD', LEASES, 'XX', 'GT', unpack(args)) end
    end
    return false
  end
  local lapsed = C('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 100)
  for _, h in ipairs(lapsed) do
    local owner = C('HGET', OWNERS, h)
    C('ZREM', LEASES, h)
    if owner and not ended(h) then
      note_try(h, owner, 'lapse')
      if not wanted(h) then forget_open(h)
      elseif not strike(h, owner) then requeue(h, run_of(owner)) end
    end
  end
  return #lapsed == 100
end
