-- KEEP: more of answers that grow. ARGV: the engine's identity, then per turn: hash, token, offset, length, part:
-- `length` tokens from token `offset` on, in the engine's own bytes behind two numbers (docs/protocol.md).
-- Offset 0 begins the record anew. Only the owner may keep, so two answers never mix.
-- Returns per turn: how many tokens are kept now (fewer than were sent: a part before this one is missing, send
-- from there), or -1: somebody else's by now, or ended.
local kept = {}
for i = 2, #ARGV, 5 do
  local h, token, offset, length, part = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 4]
  local owner, key = C('HGET', OWNERS, h), partial_key(h)
  if not owner or token_of(owner) ~= token or ended(h) then
    kept[#kept + 1] = -1
  else
    local have = C('EXISTS', key) == 1 and tonumber(C('HGET', tries_key(h), 'kept') or 0) or 0
    if offset <= have then
      if offset == 0 then
        C('DEL', key)
        C('RPUSH', key, ARGV[1])
      end
      C('RPUSH', key, part)
      have = offset + length
      C('HSET', tries_key(h), 'kept', have)
      -- More than any try before it: whatever ends this one, it has got the turn further.
      if have > tonumber(C('HGET', tries_key(h), 'most') or 0) then
        C('HSET', tries_key(h), 'most', have, 'keeper', token)
      end
    end
    kept[#kept + 1] = have
  end
end
return kept
