-- Order of jobs by key and id, and a heap of heads of buckets.

local order = {}

-- Ids are ordered by their bytes. `<` of Lua compares by the locale of the server, which orders bytes only in "C" and
-- the like; there it is several times faster than a loop.
local function compares_bytes()
  local texts = { '!', '#', '-', '-a', '0', '9', 'A', 'B', 'Z', '_', 'a', 'a-b', 'aB', 'a_', 'aa', 'b', 'z', '~', '\195\164' }
  for index = 2, #texts do
    if not (texts[index - 1] < texts[index]) then return false end
  end
  return true
end

local function is_smaller_by_bytes(a, b)
  for index = 1, math.min(#a, #b) do
    local x, y = string.byte(a, index), string.byte(b, index)
    if x ~= y then return x < y end
  end
  return #a < #b
end

if compares_bytes() then
  function order.is_smaller(a, b) return a < b end
else
  order.is_smaller = is_smaller_by_bytes
end

-- Texts that sort as jobs are claimed: the order key, then the id. Keys of absurd times are cut off.
local KEY_OFFSET, KEY_LIMIT, KEY_DIGITS = 1e15, 8e15, 16

-- A whole number as text. The formats of floats take longer than a command of Redis, and so does a number of Lua that is
-- the argument of a command; '%d' is wrong for absurd times.
local last_number, last_text
function order.number_text(number)
  if number ~= last_number then
    last_number, last_text = number, string.format(number < KEY_LIMIT and '%d' or '%.0f', number)
  end
  return last_text
end

function order.rank(key, id)
  return string.format('%016d', math.max(0, math.min(key, KEY_LIMIT) + KEY_OFFSET)) .. id
end

function order.id_of_rank(rank) return string.sub(rank, KEY_DIGITS + 1) end

function order.key_of_rank(rank) return tonumber(string.sub(rank, 1, KEY_DIGITS)) - KEY_OFFSET end

-- A heap of items by their `rank`.
function order.push(heap, item)
  local child = #heap + 1
  while child > 1 do
    local parent = math.floor(child / 2)
    if not order.is_smaller(item.rank, heap[parent].rank) then break end
    heap[child] = heap[parent]
    child = parent
  end
  heap[child] = item
end

function order.pop(heap)
  local first, size = heap[1], #heap
  local item = heap[size]
  heap[size] = nil
  size = size - 1
  if size == 0 then return first end
  local parent = 1
  while true do
    local child = 2 * parent
    if child > size then break end
    if child < size and order.is_smaller(heap[child + 1].rank, heap[child].rank) then child = child + 1 end
    if not order.is_smaller(heap[child].rank, item.rank) then break end
    heap[parent] = heap[child]
    parent = child
  end
  heap[parent] = item
  return first
end

-- Delay before a retry: exponential, with full jitter.
function order.backoff_ms(retries, failures, jitter)
  local doublings = math.min(failures - 1, CONSTANTS.max_doublings)
  local longest = math.min(retries.max_backoff_ms, retries.backoff_ms * 2 ^ doublings)
  return math.floor(jitter * longest)
end
