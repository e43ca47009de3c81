-- CLAIM: a worker takes turns. ARGV: token, how many, how many it holds, bytes (of bodies, the first always).
-- Returns: more (1: more is ready), drain (1: nothing for now, also where you have room), jobs of arq's clients to be
-- seen to, then per turn: hash, mark (an `s` behind it: somebody reads along), its waiter (priority, and when it asked), earlier
-- tries (JSON list, inside), body.
local token, want, holding, room = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local worker = token:sub(1, 8)
local STARVES_AFTER = 30000  -- ms

if C('EXISTS', Q .. 'void:' .. token) == 1 then return { 0, 0, {} } end  -- its worker has given it up: see RECOVER
reap()

local out, owners, leases = {}, {}, {}
local work, work_limit = 0, 2 * want + 200  -- hints looked at: bounds the time of this call

-- The body, nil if there is none. What is no string under that name must not stop everybody's claims: to the worker
-- it is a body that cannot be read.
local function body_of(h)
  local body = redis.pcall('GET', body_key(h))
  if type(body) == 'table' then return '' end
  return body
end

local function hand_out(h, mark, run, waiter, body, known)
  local tries = known and C('HMGET', tries_key(h), 'log', 'stream') or {}
  owners[#owners + 1] = h
  owners[#owners + 1] = token .. mark .. run
  leases[#leases + 1] = now + lease
  leases[#leases + 1] = h
  out[#out + 1] = h
  out[#out + 1] = tries[2] and mark .. 's' or mark
  out[#out + 1] = waiter
  out[#out + 1] = tries[1] or ''
  out[#out + 1] = body
  room = room - #body
end

-- A hash of up to 512 entries is a list to Valkey, and every look-up goes through it. A value beyond 64 bytes makes it
-- a table for as long as it lives.
local function write_leases()
  local first = #owners > 0 and C('EXISTS', OWNERS) == 0
  if first then C('HSET', OWNERS, '', ('-'):rep(65)) end
  for i = 1, #owners, 1000 do
    C('HSET', OWNERS, unpack(owners, i, math.min(#owners, i + 999)))
    C('ZADD', LEASES, unpack(leases, i, math.min(#leases, i + 999)))
  end
  if first then C('HDEL', OWNERS, '') end
  owners, leases = {}, {}
end

local jobs = {}
local function answer(more, drain)
  table.insert(out, 1, jobs)
  table.insert(out, 1, drain)
  table.insert(out, 1, more)
  return out
end

-- A job of arq's stays here until it has a result: who asks for the result looks. If its worker dies, it comes back.
for _, h in ipairs(C('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, 100)) do
  if #h ~= 64 then
    C('ZADD', DUE, now + 2 * lease, h)
    jobs[#jobs + 1] = h
  else
    C('ZREM', DUE, h)
    if not leased(h) then requeue(h) end
  end
end

-- Suspects are tried in small company (tries.lua): an empty worker takes them at once, a busy one those that have
-- waited, and while they are on trial it takes nothing else. So a death says much about few, and who lives through
-- its trial goes on in any company: nothing runs apart for long.
local TRIAL = 30000  -- ms; twice as long with each further strike, for those that kill late
local JOINS_AFTER, EMPTIES_AFTER = 60000, 300000  -- ms that a suspect has waited
local ON_TRIAL = trial_key(worker)

local function on_trial()
  local tried = C('SMEMBERS', ON_TRIAL)
  if #tried == 0 then return false end
  for _, owner in ipairs(holding > 0 and C('HMGET', OWNERS, unpack(tried)) or {}) do
    if owner and owner:sub(1, 8) == worker then return true end
  end
  C('DEL', ON_TRIAL)
  return false
end
if on_trial() then return answer(0, 1) end

-- Take suspects, the longest waiting first, no more than each of them may have as company. Returns whether one
-- that must be alone has waited too long for an empty worker.
local function try_suspects()
  local waiting = C('ZRANGE', SUSPECTS, 0, want - 1, 'WITHSCORES')
  local tried, together, length = {}, want, 0
  local overdue = false
  for i = 1, #waiting, 2 do
    local h, waited = waiting[i], now - tonumber(waiting[i + 1])
    if #tried >= together or (holding > 0 and waited < JOINS_AFTER) then break end
    local company = company_of(h)
    local alone = company == 1
    local run = C('HRANDFIELD', waiters_key(h))
    local body = run and not ended(h) and not leased(h) and body_of(h)
    if not body then
      C('ZREM', SUSPECTS, h)
    elseif alone and holding > 0 then
      overdue = overdue or waited > EMPTIES_AFTER
    elseif #tried < company and (#tried == 0 or #body <= room) then
      C('ZREM', SUSPECTS, h)
      hand_out(h, alone and '!' or '~', run, C('HGET', waiters_key(h), run), body, true)
      tried[#tried + 1] = h
      together = math.min(together, company)
      length = math.max(length, TRIAL * 2 ^ (strikes(h) - SUSPECT_FROM))
    end
  end
  if #tried > 0 then
    write_leases()
    C('SADD', ON_TRIAL, unpack(tried))
    C('PEXPIRE', ON_TRIAL, length)
    if C('GET', Q .. 'clearing') == worker then C('DEL', Q .. 'clearing') end
    wake()
  end
  return overdue
end

if want > 0 and C('EXISTS', SUSPECTS) == 1 then
  local overdue = try_suspects()
  if #out > 0 then return answer(0, 1) end
  if overdue then
    -- Only the first time: a worker with room would be woken by itself for as long as it empties.
    if C('SET', Q .. 'clearing', worker, 'NX', 'PX', 6 * lease) then
      wake()
      return answer(0, 1)
    end
    if C('GET', Q .. 'clearing') == worker then
      C('PEXPIRE', Q .. 'clearing', 6 * lease)
      return answer(0, 1)
    end
  end
end

-- How many of these turns have a record of this kind.
local function having(record_key, hashes)
  local keys = {}
  for i, h in ipairs(hashes) do keys[i] = record_key(h) end
  return C('EXISTS', unpack(keys))
end

-- Drop the hints at the head that nobody wants, or that are answered, by the hundred where all of a hundred
-- are: a run that left its turns leaves thousands behind, and nobody must wait until each has been looked at.
local function drop_dead(list)
  local many = 100
  while many >= 1 and work < work_limit do
    local hints = C('LRANGE', list, 0, many - 1)
    if #hints == 0 then return end
    work = work + 1 + many / 10  -- takes as long as to look at so many
    if having(waiters_key, hints) == 0 or having(reply_key, hints) == #hints then
      C('LPOP', list, #hints)
    else
      many = many / 10
    end
  end
end

-- Serve at most `limit` turns of one class: the run with the lowest virtual time first, charged at once.
local function serve(class, limit)
  local READY, served_at = Q .. 'ready:' .. class, nil
  local full = false
  while limit > 0 and work < work_limit and not full do
    local two = C('ZRANGE', READY, 0, 1, 'WITHSCORES')
    local run = two[1]
    if not run then break end
    local vt = tonumber(two[2])
    local weight = tonumber(C('HGET', run_key(run), 'weight') or 1)
    local cancelled = C('SISMEMBER', Q .. 'sweeping', run) == 1
    local take = limit
    if two[4] then
      take = math.min(limit, math.max(1, math.floor((tonumber(two[4]) - vt) * weight) + 1))
    end
    local list = Q .. 'going:' .. class .. ':' .. run
    local hints = C('LRANGE', list, 0, take - 1)
    if #hints == 0 then
      list = Q .. 'new:' .. class .. ':' .. run
      hints = C('LRANGE', list, 0, take - 1)
    end
    local taken, used, seen = 0, 0, {}
    local held = #hints > 0 and C('ZMSCORE', LEASES, unpack(hints))
    for i, h in ipairs(hints) do
      work = work + 1
      local known = C('EXISTS', reply_key(h), failure_key(h), tries_key(h))
      local open = not held[i] and not seen[h] and (known == 0 or not ended(h) and strikes(h) < SUSPECT_FROM)
      local waiter = open and C('HGET', waiters_key(h), run)
      if waiter and cancelled and C('SISMEMBER', Q .. 'sweep:' .. run, h) == 1 then waiter = false end
      local body = waiter and body_of(h)
      if body then
        if #body > room and #out > 0 then full = true break end
        seen[h] = true
        hand_out(h, '-', run, waiter, body, known > 0)
        taken = taken + 1
      end
      used = used + 1
      if work >= work_limit then break end
    end
    if used > 0 then C('LPOP', list, used) end
    if used > 0 and taken == 0 then drop_dead(list) end
    write_leases()
    -- The last turn's place in time, not the first's: who comes back meanwhile starts from there.
    if taken > 0 then served_at = vt + (taken - 1) / weight end
    limit = limit - taken
    vt = vt + taken / weight
    if #hints == 0 then
      work = work + 1
      C('ZREM', READY, run)
      C('HSET', Q .. 'vt', class .. run, vt)
    elseif taken > 0 then
      C('ZADD', READY, vt, run)
    end
  end
  if served_at then
    C('HSET', Q .. 'served', class, served_at)
    C('HSET', Q .. 'fed', class, now)
  end
  return full and 0 or limit
end

-- Classes in strict order, larger first; but one that has waited long is served a share before.
local fed = C('HGETALL', Q .. 'fed')
local classes = {}
for i = 1, #fed, 2 do
  if C('EXISTS', Q .. 'ready:' .. fed[i]) == 1 then
    classes[#classes + 1] = { fed[i], now - tonumber(fed[i + 1]) > STARVES_AFTER }
  end
end
table.sort(classes, function(a, b) return a[1] > b[1] end)
for _, class in ipairs(classes) do
  if class[2] and want > 0 then
    local share = math.max(1, math.floor(want / 8))
    want = want - share + serve(class[1], share)
  end
end
for _, class in ipairs(classes) do
  if want > 0 then want = serve(class[1], want) end
end

local more = 0
for _, class in ipairs(classes) do
  if C('EXISTS', Q .. 'ready:' .. class[1]) == 1 then more = 1 end
end
if more == 1 then wake() end
return answer(more, 0)
