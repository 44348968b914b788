-- Preemption, as `preemption.py` and `transaction.py` have it: which running jobs end to make room for others, and the
-- room that is kept for these. A room is {slots, free}.

local preemption = {}

local function room_of(slots, free) return { slots = slots, free = fit.copy(free) } end

local function end_job(room, candidate)
  room.slots = room.slots + candidate.slots
  for _, seat in ipairs(candidate.seats) do fit.give_back(seat, room.free) end
end

local function shape_of(record) return fit.shape(record.shape or records.spec(record).shape) end

-- Whether a job fits; then the room is without it.
local function start_job(room, shape)
  if room.slots <= 0 or not fit.take(shape, room.free) then return false end
  room.slots = room.slots - 1
  return true
end

local function rank_of(record)
  return order.rank(record.enqueued_ms - records.spec(record).priority * CONSTANTS.ageing_ms_per_step, record.id)
end

local function is_ending(candidate)
  return candidate.record.cancel_requested or candidate.record.preempted_for ~= nil
end

local function runs_on(record, worker)
  if not record.gang then return record.worker == worker end
  for _, member in ipairs(record.gang.members) do
    if member[1] == worker then return true end
  end
  return false
end

-- The preemptible jobs that a worker runs. Rows: job, token, slots, seats (as `fit.give_back` reads them).
function preemption.candidates(worker, rows)
  local found = {}
  for _, row in ipairs(rows) do
    local record = records.get(row[1])
    local is_valid = record and record.state == 'leased' and record.token == row[2] and runs_on(record, worker)
    if is_valid and records.spec(record).preemptible then
      found[#found + 1] = { record = record, slots = row[3], seats = row[4] }
    end
  end
  return found
end

-- The room when the ending jobs have ended and the waiting ones have started; nil if they do not fit.
local function later_room(kept, slots, free)
  local room = room_of(slots, free)
  for _, candidate in ipairs(kept.ending) do end_job(room, candidate) end
  for _, shape in ipairs(kept.shapes) do
    if not start_job(room, shape) then return nil end
  end
  return room
end

local function new_kept(candidates)
  local kept = { waiting = {}, shapes = {}, ending = {} }
  for _, candidate in ipairs(candidates) do
    if is_ending(candidate) then kept.ending[#kept.ending + 1] = candidate end
  end
  return kept
end

local function keep(kept, record, shape)
  kept.waiting[#kept.waiting + 1], kept.shapes[#kept.shapes + 1] = record, shape
end

-- Those of the queues that are not at their limit, as a set.
local function open_queues(served, share)
  local found = {}
  for _, queue in ipairs(served) do
    if not shares.is_full(share, queue) then found[queue] = true end
  end
  return found
end

-- The room to keep for ready jobs that others are ended for, or have just been ended for; nil: there are none.
function preemption.kept_room(slots, free, served, share, candidates)
  local ids = step.preemptors
  for _, candidate in ipairs(candidates) do
    if candidate.record.preempted_for then ids[candidate.record.preempted_for] = true end
  end
  if not next(ids) then return nil end
  local open, found, kept = open_queues(served, share), {}, new_kept(candidates)
  for id in pairs(ids) do
    local record = records.get(id)
    if record and record.state == 'ready' and open[record.queue] then
      found[#found + 1] = { rank = rank_of(record), record = record }
    end
  end
  table.sort(found, function(a, b) return order.is_smaller(a.rank, b.rank) end)
  for _, item in ipairs(found) do
    local shape, room = shape_of(item.record), later_room(kept, slots, free)
    -- if it does not fit, the worker has less than it had: others need not wait for that
    if start_job(room, shape) then keep(kept, item.record, shape) end
  end
  return kept
end

-- Whether the waiting jobs fit when the ending ones have ended.
function preemption.has_room(kept, slots, free)
  return #kept.waiting == 0 or later_room(kept, slots, free) ~= nil
end

-- Take the waiting jobs that fit now from their buckets and from the free resources; answer their ids and shapes.
function preemption.take_startable(kept, slots, free, share, reserving)
  local ids, shapes = {}, {}
  if not kept then return ids, shapes end
  local position = 1
  while kept.waiting[position] do
    local record, shape = kept.waiting[position], kept.shapes[position]
    local room, is_taken = room_of(slots - #ids, free), false
    if not shares.is_full(share, record.queue) and start_job(room, shape) then
      table.remove(kept.waiting, position)
      table.remove(kept.shapes, position)
      is_taken = preemption.has_room(kept, room.slots, room.free)
      if not is_taken then
        table.insert(kept.waiting, position, record)
        table.insert(kept.shapes, position, shape)
      end
    end
    if is_taken then
      fit.take(shape, free)
      buckets.remove(record)
      shares.count(share, record.queue)
      reservation.on_taken(reserving, record.queue, record.id)
      ids[#ids + 1], shapes[#shapes + 1] = record.id, shape.text
      position = 1
    else
      position = position + 1
    end
  end
  return ids, shapes
end

-- First jobs of buckets in order: {rank, queue, shape}; one per queue and shape.
local function first_jobs(served, share)
  local found, seen = {}, {}
  for queue in pairs(open_queues(served, share)) do
    for _, head in ipairs(redis.call('ZRANGE', step.prefix .. 'heads:' .. queue, 0, -1)) do
      local rank, name = buckets.parse_head(head)
      local shape = buckets.shape(name)
      if shape.ranks == 1 then found[#found + 1] = { rank = rank, queue = queue, shape = shape } end
    end
  end
  table.sort(found, function(a, b) return order.is_smaller(a.rank, b.rank) end)
  local first = {}
  for _, item in ipairs(found) do
    local name = item.queue .. '\0' .. item.shape.text
    if not seen[name] then
      seen[name] = true
      first[#first + 1] = item
    end
  end
  return first
end

-- Whether a job of this shape fits on another live worker now.
local function has_offer(queue, shape, others)
  for _, other in ipairs(others) do
    if other.queues[queue] and other.slots > 0 and fit.fits(shape, other.free) then return true end
  end
  return false
end

-- Jobs whose end makes room for one of this shape and priority; empty: no set of them does, or none is needed.
local function choose(shape, priority, room, running)
  local lower = {}
  for _, candidate in ipairs(running) do
    if records.spec(candidate.record).priority < priority then lower[#lower + 1] = candidate end
  end
  table.sort(lower, function(a, b)
    local x, y = records.spec(a.record).priority, records.spec(b.record).priority
    if x ~= y then return x < y end
    if a.record.started_ms ~= b.record.started_ms then return a.record.started_ms > b.record.started_ms end
    return order.is_smaller(a.record.id, b.record.id)
  end)
  local function suffices(chosen, without)
    local later = room_of(room.slots, room.free)
    for _, candidate in ipairs(chosen) do
      if candidate ~= without then end_job(later, candidate) end
    end
    return start_job(later, shape)
  end
  if suffices({}) or not suffices(lower) then return {} end
  for _, candidate in ipairs(lower) do
    if suffices({ candidate }) then return { candidate } end
  end
  local chosen = {}
  for _, candidate in ipairs(lower) do
    chosen[#chosen + 1] = candidate
    if suffices(chosen) then break end
  end
  for position = #chosen - 1, 1, -1 do
    if suffices(chosen, chosen[position]) then table.remove(chosen, position) end
  end
  return chosen
end

-- Request the end of jobs for the first jobs of buckets that fit on no worker, and add the ids of those that are to end to
-- `preempted`. Answer the room that is kept.
function preemption.request(worker, kept, slots, free, served, share, candidates, preempted)
  local running, waits = {}, {}
  for _, candidate in ipairs(candidates) do
    if not is_ending(candidate) then running[#running + 1] = candidate end
  end
  if not running[1] then return kept end
  kept = kept or new_kept(candidates)
  local others = offers.others(worker)
  for _, record in ipairs(kept.waiting) do waits[record.id] = true end
  for _, head in ipairs(first_jobs(served, share)) do
    local id = order.id_of_rank(head.rank)
    local is_open = not waits[id] and not has_offer(head.queue, head.shape, others)
    local record, later = records.get(id), is_open and later_room(kept, slots, free)
    local chosen = later and choose(head.shape, records.spec(record).priority, later, running) or {}
    for _, candidate in ipairs(chosen) do
      machine.request_preemption(candidate.record, id)
      machine.put(candidate.record)
      preempted[#preempted + 1] = candidate.record.id
      for _, member in ipairs(candidate.record.gang and candidate.record.gang.members or {}) do
        if member[1] ~= worker then step.woken_workers[member[1]] = true end
      end
      kept.ending[#kept.ending + 1] = candidate
      for position, other in ipairs(running) do
        if other == candidate then
          table.remove(running, position)
          break
        end
      end
    end
    if chosen[1] then keep(kept, record, head.shape) end
  end
  return kept
end
