-- What every script shares. KEYS[1]: the namespace's prefix; KEYS[2]: the prefix of one model's queue.
-- Key names are computed from these two (docs/protocol.md lists them), so no Redis Cluster.
-- Redis TIME is the only clock. Per turn, read and check first and write after.
--
-- Said of a turn:  ended   it has a reply or a failure
--                  leased  it is in `leases`
--                  wanted  somebody is in its waiters
local N, Q = KEYS[1], KEYS[2]
local C = redis.call
local clock = C('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local LEASES, OWNERS, DUE, SUSPECTS = Q .. 'leases', Q .. 'owners', Q .. 'due', Q .. 'suspects'
local SUSPECT_FROM = 2  -- strikes

local function body_key(h) return N .. 'b:' .. h end
local function reply_key(h) return N .. 'r:' .. h end
local function trace_key(h) return N .. 'x:' .. h end
local function failure_key(h) return N .. 'f:' .. h end
local function tries_key(h) return N .. 't:' .. h end
local function partial_key(h) return N .. 'p:' .. h end
local function told_key(h) return N .. 's:' .. h end
local function waiters_key(h) return N .. 'w:' .. h end
local function leavers_key(h) return N .. 'c:' .. h end
local function jobs_key(h) return N .. 'a:' .. h end
local function run_key(run) return N .. 'run:' .. run end

local function ended(h) return C('EXISTS', reply_key(h), failure_key(h)) > 0 end
local function leased(h) return C('ZSCORE', LEASES, h) end
local function wanted(h) return C('EXISTS', waiters_key(h)) == 1 end
local function strikes(h) return tonumber(C('HGET', tries_key(h), 'strikes') or 0) end

-- Turns in a worker that somebody wants to be told of while they grow: it reads this at its next RENEW.
local function asked_key(worker) return Q .. 'asked:' .. worker end

-- A waiter's value is its priority class (one digit) and when it asked (ms).
local function class_of(waiter) return waiter:sub(1, 1) end

-- One wake is enough: who takes it claims, and wakes the next one if more is ready.
local function wake()
  if C('LLEN', Q .. 'wake') == 0 then C('LPUSH', Q .. 'wake', '1') end
end

-- Tell everybody who waits that something ended; what, they read. Clients of arq wait for jobs, which CLAIM now
-- hands to a worker that tells them.
local has_jobs
local function publish(h)
  C('XADD', Q .. 'finished', 'MAXLEN', '~', '20000', '*', 'h', h)
  if has_jobs == nil then has_jobs = C('EXISTS', Q .. 'jobs') == 1 end
  if has_jobs then
    for _, job in ipairs(C('SMEMBERS', jobs_key(h))) do
      C('ZADD', DUE, 'XX', now, job)
      wake()
    end
  end
end

-- Add `amount` to a counter of every run that waits for the turn.
local function count(h, field, amount)
  for _, run in ipairs(C('HKEYS', waiters_key(h))) do
    C('HINCRBY', run_key(run), field, amount)
  end
end

-- Put a run with ready turns among the runs of its class. It comes back at its own virtual time, or at
-- the class's, whichever is later: who was away has saved up nothing.
local function activate(run, class)
  local ready = Q .. 'ready:' .. class
  if C('ZSCORE', ready, run) then return end
  if C('EXISTS', ready) == 0 then C('HSET', Q .. 'fed', class, now) end
  local own = tonumber(C('HGET', Q .. 'vt', class .. run) or 0)
  local served = tonumber(C('HGET', Q .. 'served', class) or 0)
  C('ZADD', ready, math.max(own, served), run)
end

-- An open turn goes back to the queue: to the run it was charged to if that still wants it, else to
-- another waiter; a suspect waits apart.
local function requeue(h, charged)
  if ended(h) then return end
  local run = charged
  local waiter = run and C('HGET', waiters_key(h), run)
  if not waiter then
    run = C('HRANDFIELD', waiters_key(h))
    if not run then return end
    waiter = C('HGET', waiters_key(h), run)
  end
  if strikes(h) >= SUSPECT_FROM then
    C('ZADD', SUSPECTS, 'NX', now, h)
  else
    local class = class_of(waiter)
    C('LPUSH', Q .. 'going:' .. class .. ':' .. run, h)
    activate(run, class)
  end
  wake()
end

-- Nobody wants this open turn, and nobody works on it.
local function forget_open(h)
  C('ZREM', SUSPECTS, h)
  C('ZREM', DUE, h)
  C('HDEL', OWNERS, h)
  C('DEL', body_key(h), tries_key(h), partial_key(h), told_key(h))
end

-- One run leaves a turn. how: 'cancelled' or 'deadline'. The turn goes on for the others; when it is
-- leased and nobody is left, RENEW tells its worker.
local function leave(h, run, how)
  if ended(h) or C('HDEL', waiters_key(h), run) == 0 then return false end
  C('ZREM', Q .. 'deadlines', h .. run)
  C('HSET', leavers_key(h), run, how)
  C('HINCRBY', run_key(run), how == 'cancelled' and 'cancelled' or 'failed', 1)
  if not leased(h) then
    if wanted(h) then requeue(h) else forget_open(h) end
  end
  publish(h)
  return true
end
