-- RECOVER: the answer of a CLAIM was lost. ARGV: its token. Whatever that claim took goes back, and if it
-- is still on its way it will take nothing. Returns how many turns went back.
local token = ARGV[1]
C('SET', Q .. 'void:' .. token, '1', 'PX', 600000)
local entries, back = C('HGETALL', OWNERS), 0
for i = 1, #entries, 2 do
  local h, owner = entries[i], entries[i + 1]
  if token_of(owner) == token then
    C('HDEL', OWNERS, h)
    C('ZREM', LEASES, h)
    if wanted(h) then
      note_try(h, owner, 'handback')
      requeue(h, run_of(owner))
    else
      forget_open(h)
    end
    back = back + 1
  end
end
return back
