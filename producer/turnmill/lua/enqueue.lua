-- ENQUEUE: one run asks for a batch of turns of one model.
-- ARGV: run, class (one digit), weight, deadline (ms from now; 0: none), then per ask: hash, flags, body.
-- flags: f  fresh: asked for anew, so an earlier cancel or failure is over (without it: a poll)
--        g  the next turn of a conversation that is going
--        r  also ask again what failed for a reason that stays (poison, invalid_request)
--        s  stream: tell of the answer while it grows (KEEP)
--        d  a draw, with four more ARGV behind the body: scope, base, owner, number (see number_of)
--        k  a draw whose number is how often the base was drawn in the scope before; the one given is a guess
--        o  a draw that is asked for again: one that nobody waits for any more, if there is one
-- A poll may leave the body empty, and undoes nothing; `unknown` then means: send the body.
-- Returns: stream position to read from, then per ask one of
--   answered | failed | cancelled | deadline | queued | running | unknown
-- or, of a draw that is another one than was asked for, its number: nothing else was done.
local run, class, weight, deadline = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local share = tonumber(weight) or 0
if not class:match('^%d$') or not (share >= 0.001 and share <= 1000) or not deadline then
  return redis.error_reply('TURNMILLUSAGE class is one digit, weight a number from 0.001 to 1000, deadline a number')
end
local RUN, TURNS, SWEEP = run_key(run), Q .. 'turns:' .. run, Q .. 'sweep:' .. run
local STAYS = { poison = true, invalid_request = true }

-- Room for what is queued to be answered: replies and traces come on top of the bodies.
local function full()
  local info = C('INFO', 'memory')
  local limit = tonumber(info:match('\nmaxmemory:(%d+)'))
  if not limit or limit == 0 then return false end
  local queued = C('ZCARD', LEASES) + C('ZCARD', SUSPECTS)
  for _, c in ipairs(C('HKEYS', Q .. 'fed')) do
    for _, r in ipairs(C('ZRANGE', Q .. 'ready:' .. c, 0, 99)) do
      queued = queued + C('LLEN', Q .. 'going:' .. c .. ':' .. r) + C('LLEN', Q .. 'new:' .. c .. ':' .. r)
    end
  end
  local stored = C('HMGET', Q .. 'stored', 'replies', 'bytes')
  local mean = tonumber(stored[2] or 0) / math.max(1, tonumber(stored[1] or 0))
  local used = tonumber(info:match('used_memory:(%d+)'))
  return used + queued * (mean + 300) > 0.85 * limit
end
if full() then
  return redis.error_reply('TURNMILLFULL Redis memory: what is queued would pass 85% of maxmemory')
end

local states, going, new, joined_turns = {}, {}, {}, {}
local done, failed = 0, 0
local suspects = false

local function give_time(h) C('ZADD', Q .. 'deadlines', now + deadline, h .. run) end

-- This run waits for the turn from now on. Returns whether it did not before.
local function join(h)
  if C('HSETNX', waiters_key(h), run, class .. now) == 0 then return false end
  local how = C('HGET', leavers_key(h), run)
  if how then
    C('HDEL', leavers_key(h), run)
    C('HINCRBY', RUN, how == 'cancelled' and 'cancelled' or 'failed', -1)
  end
  joined_turns[#joined_turns + 1] = h
  if deadline > 0 then give_time(h) end
  return true
end

-- The draw that `owner` is to have: the one that it has already; else the oldest that was left ('-' and a number), if
-- draws are counted, as many clients try again without saying so, or it is asked for again; then also the oldest of
-- another gateway, which may be dead, else the oldest; else the next one. It is its owner's until SETTLE. Owners are
-- `GATEWAY.REQUEST`, values `when:number`; owners in `i.` have a name to come back by.
local DRAWS_KEPT = 30 * 86400  -- seconds after the last draw of a scope
local function number_of(scope, base, owner, flags, number)
  local OPEN = N .. 'open:' .. scope .. ':' .. base
  local counted, again = flags:find('k', 1, true), flags:find('o', 1, true)
  local draw = C('HGET', OPEN, owner)
  if not draw and (counted or again) then
    local gateway, best, from = owner:match('^[^.]*'), nil, nil
    local open = C('HGETALL', OPEN)
    for j = 1, #open, 2 do
      local other, left = open[j]:match('^[^.]*'), open[j]:sub(1, 1) == '-'
      local rank = (left and '0' or other ~= gateway and '1' or '2') .. open[j + 1]
      if other ~= 'i' and (again or left) and (not best or rank < best) then
        best, from, draw = rank, open[j], open[j + 1]
      end
    end
    if from then C('HDEL', OPEN, from) end
  end
  if not draw then
    if counted then
      number = C('HINCRBY', N .. 'draws:' .. scope, base, 1) - 1
      C('EXPIRE', N .. 'draws:' .. scope, DRAWS_KEPT)
    end
    draw = now .. ':' .. number
  end
  C('HSET', OPEN, owner, draw)
  C('EXPIRE', OPEN, DRAWS_KEPT)
  return draw:match(':(.*)')
end

-- Somebody reads this open turn's answer while it grows. CLAIM says so to the next worker, RENEW to the one that has it.
local function stream(h, running)
  C('HSET', tries_key(h), 'stream', '1')
  local owner = running and C('HGET', OWNERS, h)
  if owner then
    local ASKED = asked_key(owner:sub(1, 8))
    C('SADD', ASKED, h)
    C('PEXPIRE', ASKED, 30000)
  end
end

local sweeping = C('SISMEMBER', Q .. 'sweeping', run) == 1

local function ask(h, flags, body)
  local fresh = flags:find('f', 1, true)
  local swept = sweeping and C('SISMEMBER', SWEEP, h) == 1
  local answered = C('EXISTS', reply_key(h)) == 1
  local left = not fresh and not answered and (C('HGET', leavers_key(h), run) or (swept and 'cancelled'))
  if swept and not left then C('SREM', SWEEP, h); C('SADD', TURNS, h) end
  local state
  if answered then
    state = 'answered'
    if join(h) then done = done + 1 end
  elseif left then
    state = left
  else
    local again = swept  -- CLAIM may have dropped its hint
    local kind = C('HGET', failure_key(h), 'kind')
    if kind and fresh and (not STAYS[kind] or flags:find('r', 1, true)) then
      C('RPUSH', N .. 'y:' .. h, C('HGET', failure_key(h), 'record'))
      count(h, 'failed', -1)
      C('DEL', failure_key(h))
      if deadline > 0 then give_time(h) else C('ZREM', Q .. 'deadlines', h .. run) end
      kind, again = nil, true
    end
    if kind then
      state = 'failed'
      if join(h) then failed = failed + 1 end
    elseif body == '' and C('EXISTS', body_key(h)) == 0 then
      state = 'unknown'
    else
      -- A body that was missing means that no hint can be trusted to be there.
      local restored = body ~= '' and C('SET', body_key(h), body, 'NX')
      if again and body ~= '' then C('SET', body_key(h), body) end  -- the old one may be why it failed
      local joined = join(h)
      if leased(h) then
        state = 'running'
      else
        state = 'queued'
        if joined or again or restored then
          if strikes(h) >= SUSPECT_FROM then  -- CLAIM would drop its hint
            C('ZADD', SUSPECTS, 'NX', now, h)
            suspects = true
          else
            local hints = flags:find('g', 1, true) and going or new
            hints[#hints + 1] = h
          end
        end
      end
      if flags:find('s', 1, true) then stream(h, state == 'running') end
    end
  end
  return state
end

local i = 5
while i <= #ARGV do
  local flags, state = ARGV[i + 1], nil
  if flags:find('d', 1, true) then
    local number = number_of(ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], flags, ARGV[i + 6])
    if number ~= ARGV[i + 6] then state = tonumber(number) end
  end
  states[#states + 1] = state or ask(ARGV[i], flags, ARGV[i + 2])
  i = i + (flags:find('d', 1, true) and 7 or 3)
end

-- unpack() of very many values overflows Lua's stack.
local function each_thousand(command, key, values)
  local added = 0
  for i = 1, #values, 1000 do
    added = added + C(command, key, unpack(values, i, math.min(#values, i + 999)))
  end
  return added
end
local total = each_thousand('SADD', TURNS, joined_turns)
each_thousand('RPUSH', Q .. 'going:' .. class .. ':' .. run, going)
each_thousand('RPUSH', Q .. 'new:' .. class .. ':' .. run, new)
if #joined_turns > 0 then
  C('SADD', N .. 'runs', run)
  C('SADD', N .. 'models', Q)
  C('ZREM', N .. 'expiring', run)  -- who asks for more is not over
  C('HSET', RUN, 'weight', weight)
  if total > 0 then C('HINCRBY', RUN, 'total', total) end
  if done > 0 then C('HINCRBY', RUN, 'done', done) end
  if failed > 0 then C('HINCRBY', RUN, 'failed', failed) end
end
if #going + #new > 0 then activate(run, class) end
if suspects or #going + #new > 0 then wake() end
local last = C('XREVRANGE', Q .. 'finished', '+', '-', 'COUNT', 1)
table.insert(states, 1, last[1] and last[1][1] or '0-0')
return states
