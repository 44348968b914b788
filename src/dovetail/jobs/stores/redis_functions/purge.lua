-- Removal of finished jobs.

local purge = {}

local PART = 200
local BUDGET = 1000  -- jobs that one call looks at or removes at most

local function counted_bytes(chosen)
  local sum, counts = 0, redis.call('HGETALL', step.prefix .. 'bytes')
  for position = 1, #counts, 2 do
    local state, queue = string.match(counts[position], '^(%a+):(.*)$')
    if chosen.states[state] and (not chosen.queue or queue == chosen.queue) then
      sum = sum + tonumber(counts[position + 1])
    end
  end
  return sum
end

-- Bytes of payloads and results of the finished jobs that a filter accepts.
local function finished_bytes(chosen)
  if not (chosen.function_name or chosen.schedule or chosen.finished_before_ms) then return counted_bytes(chosen) end
  local sum = 0
  for state in pairs(chosen.states) do
    for _, id in ipairs(redis.call('ZRANGE', step.prefix .. 'done:' .. state, 0, -1)) do
      local record = records.get(id)
      if record and lookup.is_accepted(chosen, record) then sum = sum + record.size end
    end
  end
  return sum
end

local function read_part(stream)
  stream.found = redis.call('ZRANGE', step.prefix .. 'done:' .. stream.state, stream.offset, stream.offset + PART - 1, 'WITHSCORES')
  stream.position, stream.offset = 1, stream.offset + PART
end

local function push_next(heap, stream)
  if stream.position > #stream.found then
    if #stream.found < 2 * PART then return end
    read_part(stream)
    if not stream.found[1] then return end
  end
  local position = stream.position
  local id, finished_ms = stream.found[position], tonumber(stream.found[position + 1])
  order.push(heap, { rank = order.rank(finished_ms, id), id = id, finished_ms = finished_ms, stream = stream })
  stream.position = position + 2
end

local function is_awaited(record)
  return record.has_dependants and redis.call('EXISTS', step.prefix .. 'waiting:' .. record.id) == 1
end

local function delete(removed)
  local by_state, ids, keys, names = {}, {}, {}, {}
  for position, record in ipairs(removed) do
    local state = record.state
    by_state[state] = by_state[state] or {}
    table.insert(by_state[state], record.id)
    ids[position], names[position] = record.id, records.key(record.id)
    local counted = state .. ':' .. record.queue
    step.counts[counted] = (step.counts[counted] or 0) - 1
    step.bytes[counted] = (step.bytes[counted] or 0) - record.size
    local key = records.spec(record).key
    if key then keys[#keys + 1] = key end
  end
  for state, of_state in pairs(by_state) do call_with('ZREM', step.prefix .. 'done:' .. state, of_state) end
  call_with('ZREM', step.prefix .. 'ids', ids)
  call_with('HDEL', step.prefix .. 'keys', keys)
  for _, name in ipairs(names) do redis.call('UNLINK', name) end
end

-- Remove jobs, the first finished first. `skipped`: state -> number of jobs to leave out, which were looked at before.
-- Answer jobs, bytes, whether it is done, and the new `skipped` (state, number ...).
function purge.run(chosen, limit, keep_bytes, skipped)
  local excess = keep_bytes and finished_bytes(chosen) - keep_bytes or math.huge
  local heap = {}
  for state in pairs(chosen.states) do
    local stream = { state = state, offset = skipped[state] or 0 }
    read_part(stream)
    if stream.found[1] then push_next(heap, stream) end
  end
  local removed, removed_bytes, looked_at, is_done = {}, 0, 0, false
  while true do
    if not heap[1] or #removed >= limit or removed_bytes >= excess then
      is_done = true
      break
    end
    if looked_at >= BUDGET then break end
    local item = order.pop(heap)
    if chosen.finished_before_ms and item.finished_ms >= chosen.finished_before_ms then
      is_done = true
      break
    end
    looked_at = looked_at + 1
    push_next(heap, item.stream)
    local record = records.get(item.id)
    if record and lookup.is_accepted(chosen, record) and not is_awaited(record) then
      removed[#removed + 1] = record
      removed_bytes = removed_bytes + record.size
    else
      skipped[item.stream.state] = (skipped[item.stream.state] or 0) + 1
    end
  end
  delete(removed)
  local left = {}
  for state, number in pairs(skipped) do
    left[#left + 1] = state
    left[#left + 1] = number
  end
  return { #removed, removed_bytes, is_done and 1 or 0, left }
end
