-- RIGHTS: what this user may not do. ARGV: commands with their arguments, each a JSON list. Calls none of them,
-- and returns the numbers of those that would be refused, from 1.
local refused = {}
for i, line in ipairs(ARGV) do
  if not redis.acl_check_cmd(unpack(cjson.decode(line))) then refused[#refused + 1] = i end
end
return refused
