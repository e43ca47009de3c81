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

-- What a turn's hash gets at the end of it: one command, whatever has changed.
local changes
local function change(field, value)
  changes[#changes + 1] = field
  changes[#changes + 1] = value
end

-- Returns how many tokens are kept: 0 if what came before this part is lost.
local function keep(h, token, most, offset, length, part)
  local key = partial_key(h)
  if offset == 0 then
    C('DEL', key)
    C('RPUSH', key, ARGV[1], part)
  elseif C('RPUSHX', key, part) == 0 then
    change('kept', 0)
    return 0
  end
  change('kept', offset + length)
  -- More than any try before it: whatever ends this one, it has got the turn further.
  if offset + length > most then
    change('most', offset + length)
    change('keeper', token)
  end
  return offset + length
end

local news = {}
local function say(h, line, at, text)
  news[#news + 1] = h
  news[#news + 1] = line .. at .. ' ' .. text
end

-- Begin a line. Without a text: what was told before is not true any more.
local function begin(h, line, text)
  if text == '' then C('DEL', told_key(h)) else C('SET', told_key(h), line .. text) end
  change('line', line)
  change('told', #text)
  say(h, line, 0, text)
  return #text
end

-- `told`: bytes of this line (nil: it is another one, or none). Returns how many are told now.
local function tell(h, told, line, at, text)
  if at > (told or 0) then return told or 0 end
  if (told or 0) == 0 then return begin(h, line, text) end
  local new = text:sub(told - at + 1)
  if new == '' then return told end
  local length = C('APPEND', told_key(h), new) - LINE
  if length ~= told + #new then  -- what was told is lost
    C('DEL', told_key(h))
    change('told', 0)
    return 0
  end
  change('told', length)
  say(h, line, told, new)
  return length
end

local results = {}
for i, h in ipairs(hashes) do
  local k = 8 * i - 6
  local token, offset, length, part = ARGV[k + 1], tonumber(ARGV[k + 2]), tonumber(ARGV[k + 3]), ARGV[k + 4]
  local line, at, text = ARGV[k + 5], tonumber(ARGV[k + 6]), ARGV[k + 7]
  local kept, told = -1, -1
  if owners[i] and token_of(owners[i]) == token then  -- so it has not ended
    changes = {}
    local tries = C('HMGET', tries_key(h), 'kept', 'most', 'line', 'told')
    kept, told = tonumber(tries[1] or 0), tries[3] == line and tonumber(tries[4]) or nil
    if length > 0 and offset <= kept then kept = keep(h, token, tonumber(tries[2] or 0), offset, length, part)
    elseif offset > 0 and C('EXISTS', partial_key(h)) == 0 then kept = 0 end
    if line ~= '' and offset + length <= kept then told = tell(h, told, line, at, text) end
    if #changes > 0 then C('HSET', tries_key(h), unpack(changes)) end
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
