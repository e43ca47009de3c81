-- REGISTER: a worker says what it is. ARGV: its lease (ms; the farm's, if it has none yet), its id, what it says of itself
-- (JSON), how long that holds (ms). At full memory too: a farm must see the workers that make room. Returns the
-- farm's lease.
C('SET', N .. 'lease', ARGV[1], 'NX')
C('SADD', N .. 'workers', ARGV[2])
C('SET', N .. 'worker:' .. ARGV[2], ARGV[3], 'PX', ARGV[4])
return tonumber(C('GET', N .. 'lease'))
