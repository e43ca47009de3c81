-- CANCEL: a run leaves turns of one model. ARGV: run, then hashes; no hashes: all of the run's turns.
-- The whole of a run is only marked here, and its hints are gone at once; RENEW clears the turns piecemeal.
-- A producer that drives the run sees `stopped`, which the next one removes, and ends; attempts that began before
-- `cancelled_at` are over. Returns how many turns were left or marked.
local run = ARGV[1]
if #ARGV > 1 then
  local left = 0
  for i = 2, #ARGV do
    if leave(ARGV[i], run, 'cancelled') then left = left + 1 end
  end
  return left
end
C('HSET', run_key(run), 'stopped', now, 'cancelled_at', now)
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
  for _, class in ipairs(C('HKEYS', Q .. 'fed')) do
    C('UNLINK', Q .. 'going:' .. class .. ':' .. run, Q .. 'new:' .. class .. ':' .. run)
  end
end
return marked
