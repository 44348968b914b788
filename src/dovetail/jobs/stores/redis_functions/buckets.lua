-- Buckets of ready jobs, and the index of their first jobs.
--
-- A queue has a bucket per shape for jobs of priority 0 and one for all others: in the first, the first job is the one
-- that waits longest, so that counts of queues need not read every job.

local buckets = {}

local OTHER_PRIORITIES = 33  -- '!'

local function name_of(priority, shape)
  return (priority == 0 and '=' or '!') .. shape
end

local shapes_by_name, names_cached = {}, 0

-- The shape of a bucket; one object per shape. Kept over calls, because a claim looks at many buckets.
function buckets.shape(name)
  local found = shapes_by_name[name]
  if found then return found end
  if names_cached >= CONSTANTS.shapes_cached then
    shapes_by_name, names_cached = {}, 0
  end
  found = fit.shape(string.sub(name, 2))
  shapes_by_name[name] = found
  names_cached = names_cached + 1
  return found
end

function buckets.key(queue, name)
  return step.prefix .. 'ready:' .. #queue .. ':' .. queue .. ':' .. name
end

local function change_of(record)
  local spec = records.spec(record)
  local name = name_of(spec.priority, record.shape or spec.shape)
  local key = buckets.key(record.queue, name)
  local change = step.buckets[key]
  if not change then
    change = { key = key, queue = record.queue, name = name, ranks = {}, ages = {}, removes = false }
    step.buckets[key] = change
  end
  return change, spec.priority
end

function buckets.add(record)
  local change, priority = change_of(record)
  local rank = order.rank(record.enqueued_ms - priority * CONSTANTS.ageing_ms_per_step, record.id)
  if not change.first or order.is_smaller(rank, change.first) then change.first = rank end
  change.ranks[rank], change.ages[record.id] = '0', order.number_text(record.enqueued_ms)
end

function buckets.remove(record)
  local change, priority = change_of(record)
  local rank = order.rank(record.enqueued_ms - priority * CONSTANTS.ageing_ms_per_step, record.id)
  change.ranks[rank], change.ages[record.id], change.removes = false, false, true
end

function buckets.has_ages(name) return string.byte(name) == OTHER_PRIORITIES end

function buckets.oldest_ms(queue, name)
  if buckets.has_ages(name) then
    return tonumber(redis.call('ZRANGE', step.prefix .. 'age:' .. queue, 0, 0, 'WITHSCORES')[2])
  end
  return order.key_of_rank(redis.call('ZRANGE', buckets.key(queue, name), 0, 0)[1])
end

-- A member of the index of first jobs: rank, zero byte and name of the bucket.
function buckets.head(rank, name) return rank .. '\0' .. name end

function buckets.parse_head(head)
  local zero = string.find(head, '\0', 1, true)
  return string.sub(head, 1, zero - 1), string.sub(head, zero + 1)
end

function buckets.name_of_head(head)
  return string.sub(head, string.find(head, '\0', 1, true) + 1)
end

function buckets.write()
  local heads = {}
  for _, change in pairs(step.buckets) do
    local before = redis.call('ZRANGE', change.key, '0', '0')[1]
    change_set(change.key, change.ranks)
    if buckets.has_ages(change.name) then change_set(step.prefix .. 'age:' .. change.queue, change.ages) end
    local after = change.first
    if change.removes then
      after = redis.call('ZRANGE', change.key, '0', '0')[1]
    elseif before and order.is_smaller(before, after) then
      after = before
    end
    if after ~= before then
      local changes = heads[change.queue] or {}
      heads[change.queue] = changes
      if before then changes[buckets.head(before, change.name)] = false end
      if after then changes[buckets.head(after, change.name)] = '0' end
    end
  end
  buckets.write_heads(heads)
  step.buckets = {}
end

-- Change the first jobs of buckets: queue -> head -> '0', or false to remove it.
function buckets.write_heads(heads)
  for queue, changes in pairs(heads) do change_set(step.prefix .. 'heads:' .. queue, changes) end
end
