-- KEEP: more of answers that grow, and what readers are told of them. ARGV: the engine's identity, then per turn: hash,
-- token; offset, length, part: `length` tokens from token `offset` on, in the engine's own bytes behind two numbers
-- (docs/protocol.md); line, at, text: readers are told `text`, from byte `at` of the line on. A line is what tries say
-- of one answer, each going on from the other, and is named by the token of the first; '': nothing is told.
-- Offset 0 begins the record anew, another line begins what is told anew. Only the owner may keep, so two answers never
-- mix; only text whose tokens are kept is told, so the next try can go on from it.
-- Returns per turn two numbers: how many tokens are kept and how many bytes told now (others than were sent: something
-- before this is missing, send from there), or -1 and -1: somebody else's by now, or ended.
local TOLD = Q .. 'told'
local LINE = 24  -- bytes

local hashes = {}
for i = 2, #ARGV, 8 do hashes[#hashes + 1] = ARGV[i] end
local owners = C('HMGET', OWNERS, unpack(hashes))

local function keep(h, token, have, most, offset, length, part)
  local key = partial_key(h)
  if offset == 0 then
    C('DEL', key)
    C('RPUSH', key, ARGV[1])
  end
  C('RPUSH', key, part)
  have = offset + length
  -- More than any try before it: whatever ends this one, it has got the turn further.
  if have > most then C('HSET', tries_key(h), 'kept', have, 'most', have, 'keeper', token)
  else C('HSET', tries_key(h), 'kept', have) end
  return have
end

local news = {}
local function say(h, line, at, text)
  news[#news + 1] = h
  news[#news + 1] = line .. at .. ' ' .. text
end

-- `told`: bytes of the line that goes on (nil: another one, or none).
local function tell(h, told, line, at, text)
  if not told then
    if at > 0 then return 0 end
    if text == '' then  -- what was told before is not true any more
      C('DEL', told_key(h))
    else
      C('SET', told_key(h), line .. text)
      C('HSET', tries_key(h), 'line', line)
    end
    say(h, line, 0, text)
    return #text
  end
  local new = at <= told and text:sub(told - at + 1) or ''
  if new == '' then return told end
  C('APPEND', told_key(h), new)
  say(h, line, told, new)
  return told + #new
end

local results = {}
for i, h in ipairs(hashes) do
  local k = 8 * i - 6
  local token, offset, length, part = ARGV[k + 1], tonumber(ARGV[k + 2]), tonumber(ARGV[k + 3]), ARGV[k + 4]
  local line, at, text = ARGV[k + 5], tonumber(ARGV[k + 6]), ARGV[k + 7]
  local kept, told = -1, -1
  if owners[i] and token_of(owners[i]) == token and not ended(h) then
    local tries = C('HMGET', tries_key(h), 'kept', 'most', 'line')
    kept = C('EXISTS', partial_key(h)) == 1 and tonumber(tries[1] or 0) or 0
    if line ~= '' then
      told = tries[3] == line and C('STRLEN', told_key(h)) - LINE or nil
      if told and told < 0 then told = nil end
    end
    if offset <= kept then
      if length > 0 then kept = keep(h, token, kept, tonumber(tries[2] or 0), offset, length, part) end
      if line ~= '' then told = tell(h, told, line, at, text) end
    end
  end
  results[#results + 1] = kept
  results[#results + 1] = told or 0
end

if #news > 0 then
  -- Readers that are further behind read what there is of their turns, and go on from there.
  C('XADD', TOLD, 'MINID', '~', now - 10000, '*', unpack(news))
  C('PEXPIRE', TOLD, 60000)
end
return results
