-- Gangs, as `gang_placement.py`, `state_machine.py` and `transaction.py` have them. The gang of a leased record:
-- {members, address, result, encoding, preempted}; a member: {worker, deadline_ms, whether it is sent, whether it has
-- ended}. `assigned:WORKER` is the set of the gangs with members that are to be sent to a worker.

local gangs = {}

local WORKER, DEADLINE, SENT, ENDED = 1, 2, 3, 4

local function assigned_key(worker) return step.prefix .. 'assigned:' .. worker end

-- A member of a gang for its worker, as `redis_codec._member_from` reads it; `position`: number of jobs before it.
local function member_row(record, rank, deadline_ms, position, text, payload, shape)
  local workers = {}
  for index, member in ipairs(record.gang.members) do workers[index] = member[WORKER] end
  return {
    position, record.id, text, payload, shape, record.token, record.attempt, rank, deadline_ms, record.gang.address, workers,
  }
end

-- Send a worker the members that other claims have placed on it: append them to `rows`, and answer the slots and the
-- free resources that they leave.
function gangs.send(worker, slots, free, lease_ms, rows)
  local ids = redis.call('SMEMBERS', assigned_key(worker))
  if not ids[1] then return slots, free end
  free = fit.copy(free)
  free.is_changed = true
  table.sort(ids, order.is_smaller)
  for _, id in ipairs(ids) do
    local record = records.get(id)
    local text, payload = records.texts(id)
    local shape, deadline_ms = fit.shape(record.shape or records.spec(record).shape), step.now_ms + lease_ms
    for index, member in ipairs(record.gang.members) do
      if member[WORKER] == worker then
        if not member[SENT] then
          rows[#rows + 1] = member_row(record, index - 1, deadline_ms, 0, text, payload, shape.text)
          -- if it does not fit any more, the worker gives it back
          if slots > 0 and fit.take(shape, free) then slots = slots - 1 end
        end
        member[DEADLINE], member[SENT] = deadline_ms, true
      end
    end
    machine.set_gang_deadline(record)
    machine.put(record)
  end
  redis.call('DEL', assigned_key(worker))
  return slots, free
end

-- How many ranks fit, at most `most`; they are taken from the free resources.
local function take_ranks(shape, slots, free, most)
  local count = 0
  while count < most and count < slots and fit.take(shape, free) do count = count + 1 end
  return count
end

-- Where the ranks run: {worker, ranks, offer, free}, the claiming worker first; nil if they do not fit.
local function place(worker, queue, shape, slots, free)
  local own_free, missing = fit.copy(free), shape.ranks
  local own = take_ranks(shape, slots, own_free, missing)
  if own == 0 then return nil end
  missing = missing - own
  local chosen, fitting, reserved = { { worker = worker, ranks = own, free = own_free } }, {}, reservation.workers()
  if missing > 0 then
    for _, offer in ipairs(offers.others(worker)) do
      local is_open = offer.queues[queue] and not reserved[offer.id]
      local count = is_open and take_ranks(shape, offer.slots, fit.copy(offer.free), missing) or 0
      if count > 0 then fitting[#fitting + 1] = { worker = offer.id, ranks = count, offer = offer } end
    end
    table.sort(fitting, function(a, b)
      if a.ranks ~= b.ranks then return a.ranks > b.ranks end
      return order.is_smaller(a.worker, b.worker)
    end)
  end
  for _, item in ipairs(fitting) do
    if missing == 0 then break end
    item.ranks, item.free = math.min(item.ranks, missing), fit.copy(item.offer.free)
    take_ranks(shape, item.ranks, item.free, item.ranks)
    missing = missing - item.ranks
    chosen[#chosen + 1] = item
  end
  return missing == 0 and chosen or nil
end

-- Claim a gang, all of its ranks. Append those of the claiming worker to `rows`, and answer how many they are; nil: it
-- does not fit.
function gangs.claim(worker, id, queue, shape, slots, free, kept, lease_ms, address, rows, position)
  local chosen = place(worker, queue, shape, slots, free)
  local own = chosen and chosen[1]
  if not own or (kept and not preemption.has_room(kept, slots - own.ranks, own.free)) then return nil end
  local record, deadline_ms, members = records.get(id), step.now_ms + lease_ms, {}
  for index, item in ipairs(chosen) do
    for _ = 1, item.ranks do members[#members + 1] = { item.worker, deadline_ms, index == 1, false } end
    if item.offer then
      local offer, slots_left = item.offer, item.offer.slots - item.ranks
      offers.put(item.worker, offer.offered_ms, offer.lease_ms, slots_left, fit.text(item.free), false)
      redis.call('SADD', assigned_key(item.worker), id)
      step.woken_workers[item.worker] = true
    end
  end
  machine.claim(record, worker, lease_ms)
  records.set(record, 'gang', { members = members, address = address, encoding = '', preempted = false })
  machine.put_claimed(record)
  machine.count_claimed(worker, queue, 1)
  step.due[id] = order.number_text(deadline_ms)
  local text, payload = records.texts(id)
  for rank = 0, own.ranks - 1 do
    rows[#rows + 1] = member_row(record, rank, deadline_ms, position, text, payload, shape.text)
  end
  take_ranks(shape, own.ranks, free, own.ranks)
  return own.ranks
end
