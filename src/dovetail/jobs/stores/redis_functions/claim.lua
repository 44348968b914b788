-- Claims: the first jobs of the buckets of some queues, in order, as long as they fit.

local claim = {}

local MOST_HEADS = 128  -- first jobs that are read at once

-- First jobs of the buckets of a queue, in order, read in parts.
local function read_heads(stream)
  local found = redis.call(
    'ZRANGE', step.prefix .. 'heads:' .. stream.queue, order.number_text(stream.offset),
    order.number_text(stream.offset + stream.size - 1))
  stream.offset, stream.found, stream.position = stream.offset + stream.size, found, 1
  stream.is_last = #found < stream.size
  stream.size = MOST_HEADS
end

-- Skip first jobs that need more CPU or memory than is free. What is free only becomes less. Jobs for which a worker is to
-- be reserved are not skipped.
local function skip_large(stream, free, refused, reserving)
  local found, position, cpu_milli, memory_bytes = stream.found, stream.position, free.cpu_milli, free.memory_bytes
  local name_of_head, shape_of = buckets.name_of_head, buckets.shape
  while found[position] do
    local shape = shape_of(name_of_head(found[position]))
    if shape.cpu_milli <= cpu_milli and shape.memory_bytes <= memory_bytes and not refused[shape] then break end
    if order.is_smaller(found[position], reserving.old) then
      local watched = reservation.watched(reserving, stream.queue)
      if watched then break end
    end
    position = position + 1
    if not found[position] and not stream.is_last then
      read_heads(stream)
      found, position = stream.found, 1
    end
  end
  stream.position = position
end

-- Go to the next first job.
local function advance(stream)
  stream.position = stream.position + 1
  if not stream.found[stream.position] and not stream.is_last then read_heads(stream) end
end

-- The stream with the earliest first job; nil if all are at their end.
local function first_stream(streams)
  local first, head
  for position = #streams, 1, -1 do
    local stream = streams[position]
    if not stream.found[stream.position] then
      table.remove(streams, position)
    elseif not streams[2] then
      return stream
    else
      local member = stream.found[stream.position]
      if not head or order.is_smaller(member, head) then first, head = stream, member end
    end
  end
  return first
end

-- The rank of the next job of a bucket, after those that this claim has taken, which are still in it. Read in growing
-- parts.
local function next_of(bucket, slots_left)
  local rank = bucket.ranks[bucket.position]
  if not rank then
    local first, size = bucket.taken, math.max(1, math.min(slots_left, bucket.part))
    bucket.ranks = redis.call('ZRANGE', bucket.key, order.number_text(first), order.number_text(first + size - 1))
    bucket.position, bucket.part = 1, 2 * bucket.part
    rank = bucket.ranks[1]
  end
  bucket.position = bucket.position + 1
  return rank
end

-- A bucket from which jobs are taken; in the heap its `rank` is that of its next job.
local function start_bucket(stream, head)
  local rank, name = buckets.parse_head(head)
  return {
    queue = stream.queue, name = name, key = stream.keys .. name, shape = buckets.shape(name), head = head, rank = rank,
    ranks = NOTHING, position = 1, part = 2, taken = 0,
  }
end

-- Queues that are not paused, each once.
function claim.served_queues(queues)
  local served, seen = {}, {}
  for _, queue in ipairs(queues) do
    local settings = step.queues[queue]
    if not seen[queue] and not (settings and settings[1]) then
      seen[queue] = true
      served[#served + 1] = queue
    end
  end
  return served
end

-- Queues that are served in the order of their jobs: streams of first jobs, and a heap of the buckets from which jobs are
-- taken. `share`: state of `shares`.
local function start_groups(queues, slots, share)
  local groups, by_name = {}, {}
  for _, queue in ipairs(queues) do
    local name = shares.group_of(share, queue)
    local group = by_name[name]
    if not group then
      group = { name = name, streams = {}, heap = {}, following = nil }
      by_name[name], groups[#groups + 1] = group, group
    end
    local size = math.min(slots + 1, MOST_HEADS)
    local stream = { queue = queue, keys = buckets.key(queue, ''), offset = 0, size = size }
    read_heads(stream)
    group.streams[#group.streams + 1] = stream
  end
  return groups
end

-- Take the bucket with the first job out of a group; nil if there is none.
local function pop_bucket(group, free, refused, reserving)
  for _, stream in ipairs(group.streams) do skip_large(stream, free, refused, reserving) end
  local stream, bucket = first_stream(group.streams), group.heap[1]
  if bucket and not (stream and order.is_smaller(stream.found[stream.position], bucket.rank)) then
    return order.pop(group.heap)
  elseif stream then
    bucket = start_bucket(stream, stream.found[stream.position])
    advance(stream)
    return bucket
  end
  return nil
end

-- The group to serve, with its next bucket in `following`; nil if there is none.
local function next_group(groups, free, refused, share, reserving)
  local found
  for position = #groups, 1, -1 do
    local group = groups[position]
    group.following = group.following or pop_bucket(group, free, refused, reserving)
    if not group.following then
      table.remove(groups, position)
    elseif not found then
      found = group
    else
      local use, least = shares.use(share, group.name), shares.use(share, found.name)
      if use < least or (use == least and order.is_smaller(group.following.rank, found.following.rank)) then found = group end
    end
  end
  return found
end

local function append(lists, name, value)
  local list = lists[name]
  if not list then
    list = {}
    lists[name] = list
  end
  list[#list + 1] = value
end

-- Remove the taken jobs from their buckets.
local function write_buckets(started)
  local removed, added = {}, {}
  for _, bucket in ipairs(started) do
    redis.call('ZREMRANGEBYRANK', bucket.key, '0', order.number_text(bucket.taken - 1))
    append(removed, bucket.queue, bucket.head)
    if bucket.rank then
      append(added, bucket.queue, '0')
      append(added, bucket.queue, buckets.head(bucket.rank, bucket.name))
    end
  end
  for queue, heads in pairs(removed) do call_with('ZREM', step.prefix .. 'heads:' .. queue, heads) end
  for queue, heads in pairs(added) do call_with('ZADD', step.prefix .. 'heads:' .. queue, heads) end
end

-- Whether a job of this shape leaves the room that is kept for others, or does not fit anyway. `without`: names of
-- buckets that do not.
local function has_kept_room(kept, slots, free, shape, without, name)
  if without[name] then return false end
  local left = fit.copy(free)
  if fit.take(shape, left) and not preemption.has_room(kept, slots, left) then without[name] = true end
  return not without[name]
end

-- Whether a job that fits delays no reserved one, and is not left to another worker.
local function may_take(bucket, free, slots, choice, reserving)
  local queue, shape, id = bucket.queue, bucket.shape, order.id_of_rank(bucket.rank)
  if reservation.refuses(reserving, bucket.rank, queue, shape, free, slots) then return false end
  return reservation.is_held(reserving, id) or not placement.leaves(choice, id, queue, shape, free)
end

-- Ids and shapes of the jobs to claim, in order, which are taken from the free resources. They are not in their buckets
-- any more. `share`: state of `shares`. `kept`: room for other jobs, or nil. `claim_gang`: claims a gang, behind this
-- number of jobs.
local function take(slots, free, served, share, choice, kept, reserving, claim_gang)
  local refused, started, without = {}, {}, {}
  local groups = start_groups(served, slots, share)
  local taken, texts, used = {}, {}, 0
  local function start(group, bucket, slots_used)
    if bucket.taken == 0 then started[#started + 1] = bucket end
    bucket.taken, used = bucket.taken + 1, used + slots_used
    shares.count(share, bucket.queue)
    local id = order.id_of_rank(bucket.rank)
    if buckets.has_ages(bucket.name) then redis.call('ZREM', step.prefix .. 'age:' .. bucket.queue, id) end
    bucket.rank = next_of(bucket, slots - used)
    if bucket.rank then order.push(group.heap, bucket) end
  end
  while used < slots do
    local group = next_group(groups, free, refused, share, reserving)
    if not group then break end
    local bucket = group.following
    local shape, id = bucket.shape, order.id_of_rank(bucket.rank)
    group.following = nil
    if shape.ranks > 1 then
      local name = bucket.queue .. '\0' .. shape.text
      local is_open = not without[name] and not shares.is_full(share, bucket.queue)
      local ranks = is_open and claim_gang(bucket, shape, slots - used, free, #taken)
      if ranks then start(group, bucket, ranks) else without[name] = true end
    elseif not shares.is_full(share, bucket.queue) and not placement.has_left(choice, bucket.queue, shape) then
      local name = kept and bucket.queue .. '\0' .. shape.text
      if refused[shape] or not fit.fits(shape, free) then
        refused[shape] = true
        reservation.on_unfit(reserving, bucket.rank, bucket.queue, shape)
      elseif
        (not kept or has_kept_room(kept, slots - used - 1, free, shape, without, name))
        and may_take(bucket, free, slots - used, choice, reserving)
      then
        fit.take(shape, free)
        reservation.on_taken(reserving, bucket.queue, id)
        taken[#taken + 1], texts[#taken + 1] = id, shape.text
        start(group, bucket, 1)
      end
    end
  end
  write_buckets(started)
  return taken, texts, used
end

-- Jobs that an exchange claims. `texts`: id, specification, payload and shape of each; `numbers`: their lengths, fencing
-- token and attempt of each; a length of -1: the text of the job before.
function claim.start(worker, lease_ms, ends_in_ms)
  return {
    worker = worker, lease_ms = lease_ms, due_ms = order.number_text(step.now_ms + lease_ms),
    ends_in_ms = ends_in_ms, ends_ms = ends_in_ms and step.now_ms + ends_in_ms,
    texts = {}, numbers = {}, place = 0, count = 0, jobs = 0, jobs_of = {},
  }
end

-- Lease jobs, which are not in their buckets any more.
local function lease(state, ids, shapes)
  local texts, numbers, place, count = state.texts, state.numbers, state.place, state.count
  for position = 1, #ids do
    local id, shape = ids[position], shapes[position]
    local queue, token, attempt, text, payload, timeout_ms = records.claim_plain(id, state.worker)
    if not queue then
      local record = records.get(id)
      if record then
        machine.claim(record, state.worker, state.lease_ms)
        machine.put_claimed(record)
        queue, token, attempt, timeout_ms = record.queue, record.token, record.attempt, record.timeout_ms
        text, payload = records.texts(id)
      end
    end
    if queue then
      step.due[id] = state.due_ms
      state.ends_ms = state.ends_ms and timeout_ms and math.max(state.ends_ms, step.now_ms + timeout_ms)
      state.jobs, state.jobs_of[queue] = state.jobs + 1, (state.jobs_of[queue] or 0) + 1
      local text_size, shape_size = -1, -1
      texts[place + 1], texts[place + 2] = id, payload
      place = place + 2
      if text ~= state.last_text then
        place, state.last_text, text_size = place + 1, text, #text
        texts[place] = text
      end
      if shape ~= state.last_shape then
        place, state.last_shape, shape_size = place + 1, shape, #shape
        texts[place] = shape
      end
      numbers[count + 1], numbers[count + 2], numbers[count + 3] = #id, #payload, text_size
      numbers[count + 4], numbers[count + 5], numbers[count + 6] = shape_size, token, attempt
      count = count + 6
    end
  end
  state.place, state.count = place, count
end

-- Attempts of a job until now.
local function attempts_of(id)
  if step.records[id] ~= nil then return step.records[id] and step.records[id].attempt or 0 end
  local text = redis.call('HGET', records.key(id), 'm')
  if not text then return 0 end
  local _, _, _, _, _, attempt = cmsgpack.unpack(text)
  return attempt
end

-- The buckets of a queue and a shape.
local function buckets_of(queue, text, most)
  local found = {}
  for _, name in ipairs({ '=' .. text, '!' .. text }) do
    local key = buckets.key(queue, name)
    local ranks = redis.call('ZRANGE', key, 0, most)
    if ranks[1] then
      found[#found + 1] = {
        queue = queue, name = name, key = key, ranks = ranks, head = buckets.head(ranks[1], name), rank = ranks[1], taken = 0,
      }
    end
  end
  return found
end

-- The bucket with the first job; nil: none has jobs left.
local function first_bucket(sources)
  local first, second = sources[1], sources[2]
  if second and second.rank and not (first.rank and order.is_smaller(first.rank, second.rank)) then return second end
  return first and first.rank and first or nil
end

-- Claim jobs for the batches that the worker is filling: the first of their buckets, as far as they were never attempted.
-- Rows: queue, shape, number of jobs, bytes of payload (false: no limit).
function claim.fill(state, rows, served, share)
  local is_served = {}
  for _, queue in ipairs(served) do is_served[queue] = true end
  for _, row in ipairs(rows) do
    local queue, text, jobs_left, bytes_left = row[1], row[2], row[3], row[4] or math.huge
    local ids, shapes, started = {}, {}, {}
    local sources = is_served[queue] and buckets_of(queue, text, jobs_left) or {}
    while jobs_left > 0 and bytes_left > 0 and not shares.is_full(share, queue) do
      local bucket = first_bucket(sources)
      local id = bucket and order.id_of_rank(bucket.rank)
      if not id or attempts_of(id) > 0 then break end
      if bucket.taken == 0 then started[#started + 1] = bucket end
      bucket.taken = bucket.taken + 1
      bucket.rank = bucket.ranks[bucket.taken + 1]
      if buckets.has_ages(bucket.name) then redis.call('ZREM', step.prefix .. 'age:' .. queue, id) end
      shares.count(share, queue)
      local reserved = reservation.release(queue, id)
      if reserved then step.woken_workers[reserved] = true end
      jobs_left = jobs_left - 1
      if row[4] then bytes_left = bytes_left - redis.call('HSTRLEN', records.key(id), 'p') end
      ids[#ids + 1], shapes[#shapes + 1] = id, text
    end
    write_buckets(started)
    lease(state, ids, shapes)
  end
end

-- The texts and numbers (integers of four bytes) of the claimed jobs, and when all jobs of the worker will have ended
-- (false: not known).
function claim.finish(state, members)
  for queue, jobs in pairs(state.jobs_of) do machine.count_claimed(state.worker, queue, jobs) end
  for position = 1, state.count do state.numbers[position] = struct.pack('>i4', state.numbers[position]) end
  return state.texts, state.numbers, not members[1] and state.ends_ms or false
end

-- Claim jobs of these queues, which are not paused. Answer the free resources that they leave, the slots, and when jobs
-- are taken that were left to other workers. `kept`: room for jobs that others are ended for, which are claimed first;
-- nil: none. `address`: where rank 0 of a gang can listen; '': no gang is taken. The members of one are appended to
-- `members`.
function claim.run(state, slots, given, served, delay_ms, share, kept, address, members)
  if slots <= 0 then return given, slots, math.huge end
  local worker, lease_ms = state.worker, state.lease_ms
  local choice = placement.start(worker, delay_ms)
  local free = fit.copy(given)
  free.text = given.text
  local reserving = reservation.start(worker, given, state.ends_in_ms, served, share, choice)
  local taken, shapes = preemption.take_startable(kept, slots, free, share, reserving)
  buckets.write()
  local function claim_gang(bucket, shape, slots_left, left, position)
    if address == '' or reservation.refuses_gang(reserving, bucket.rank) then return nil end
    local id = order.id_of_rank(bucket.rank)
    position = position + state.jobs + #taken
    local ranks =
      gangs.claim(worker, id, bucket.queue, shape, slots_left, left, kept, lease_ms, address, members, position)
    if ranks then
      address = ''
      placement.forget_others(choice)
    end
    return ranks
  end
  local more, more_shapes, used = take(slots - #taken, free, served, share, choice, kept, reserving, claim_gang)
  local slots_left = slots - #taken - used
  for position = 1, #more do taken[#taken + 1], shapes[#shapes + 1] = more[position], more_shapes[position] end
  lease(state, taken, shapes)
  return free, slots_left, choice.until_ms
end
