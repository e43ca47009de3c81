-- CANCEL: a run leaves turns of one model. ARGV: run, then hashes; no hashes: all of the run's turns.
-- The whole of a run is only marked here: CLAIM passes over marked turns, RENEW clears them piecemeal.
-- Returns how many turns were left or marked.
local run = ARGV[1]
if #ARGV > 1 then
  local left = 0
  for i = 2, #ARGV do
    if leave(ARGV[i], run, 'cancelled') then left = left + 1 end
  end
  return left
end
local TURNS, SWEEP = Q .. 'turns:' .. run, Q .. 'sweep:' .. run
local marked = C('SCARD', TURNS)
if marked > 0 then
  if C('EXISTS', SWEEP) == 1 then
    C('SUNIONSTORE', SWEEP, SWEEP, TURNS)
    C('DEL', TURNS)
  else
    C('RENAME', TURNS, SWEEP)
  end
  C('SADD', Q .. 'sweeping', run)
end
return marked
