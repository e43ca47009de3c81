-- SETTLE: how an ask for a draw ended. ARGV: scope, base, owner, `delivered` (its answer is about to be given) or `left`
-- (nobody waits for it here any more: who asks next takes it, or the owner itself if it has a name to come back by).
-- Returns 1; or 0, nothing was done: the draw is somebody else's by now.
local scope, base, owner, how = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local OPEN = N .. 'open:' .. scope .. ':' .. base
local draw = C('HGET', OPEN, owner)
if not draw then return 0 end
if how == 'left' and owner:sub(1, 2) == 'i.' then return 1 end
if how == 'left' then C('HSET', OPEN, '-' .. draw:match(':(.*)'), draw) end
C('HDEL', OPEN, owner)
return 1
