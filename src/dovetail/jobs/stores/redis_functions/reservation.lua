-- Workers kept free for jobs which do not fit: `claim_reservations.py`.
--
-- `step.reserved`: queue -> {job or "", worker, when it was made or tried, rank and shape of the job}.

local reservation = {}

local function write(queue, entry)
  local reserved = {}
  for other, of_other in pairs(step.reserved) do reserved[other] = of_other end
  reserved[queue] = entry
  step.reserved = reserved
  if next(reserved) then
    redis.call('HSET', step.prefix .. 'meta', 'reserved', cmsgpack.pack(reserved))
  else
    redis.call('HDEL', step.prefix .. 'meta', 'reserved')
  end
end

-- A job of a queue waits no more: the worker that is reserved for it can take others. Answer the worker.
function reservation.release(queue, id)
  local found = step.reserved[queue]
  if not found or found[1] ~= id then return nil end
  write(queue, nil)
  return found[2]
end

-- Forget that no worker could be reserved.
function reservation.forget_tries()
  for queue, found in pairs(step.reserved) do
    if found[1] == '' and found[3] <= step.now_ms - CONSTANTS.reserve_again_ms then write(queue, nil) end
  end
end

local function fits_empty(shape, kind)
  kind.fits_empty = kind.fits_empty or {}
  local found = kind.fits_empty[shape]
  if found == nil then
    found = fit.fits(shape, fit.empty(kind))
    kind.fits_empty[shape] = found
  end
  return found
end

-- Whether a worker is to be reserved for a job of this queue that does not fit.
local function needs_worker(state, queue)
  local found = step.reserved[queue]
  if not found then return true end
  if found[1] ~= '' then return not placement.is_live(state.choice, found[2]) end
  return found[3] <= step.now_ms - CONSTANTS.reserve_again_ms
end

local function is_served(queue, queues)
  for _, other in ipairs(queues) do
    if other == queue then return true end
  end
  return false
end

-- The reservation of the worker that claims, if its job waits and could be taken by this claim.
local function held_for(state, queues, share)
  for queue, found in pairs(step.reserved) do
    if found[1] ~= '' and found[2] == state.worker then
      if not is_served(queue, queues) or shares.is_full(share, queue) then return nil end
      local record = records.get(found[1])
      if not record or record.state ~= 'ready' then
        write(queue, nil)
        state.tries[queue] = CONSTANTS.max_reserve_tries
        return nil
      end
      local shape = fit.shape(found[5])
      if state.ends_in_ms == 0 and not fit.fits(shape, state.given) then
        write(queue, { '', '', step.now_ms, '', '' })
        return nil
      end
      return { id = found[1], rank = found[4], shape = shape, start_ms = state.ends_ms }
    end
  end
  return nil
end

-- State of a claim. `given`: its free resources; `ends_in_ms`: false if it is not known when its jobs end.
function reservation.start(worker, given, ends_in_ms, queues, share, choice)
  local state = {
    worker = worker, given = given, ends_in_ms = ends_in_ms, ends_ms = ends_in_ms and step.now_ms + ends_in_ms,
    choice = choice, tries = {}, considered = {}, watched = {}, held = {},
    old = order.rank(step.now_ms - CONSTANTS.reserve_after_ms + 1, ''),
  }
  if next(step.reserved) then state.hold = held_for(state, queues, share) end
  return state
end

-- Ranks before this one are of jobs of this queue for which a worker is to be reserved if they do not fit; nil: none.
function reservation.watched(state, queue)
  local watched = state.watched[queue]
  if watched == nil then
    watched = not state.tries[queue] and needs_worker(state, queue) and state.old
    state.watched[queue] = watched
  end
  return watched
end

local function is_before(ends_ms, id, best)
  if not best then return true end
  if (ends_ms or math.huge) ~= (best.ends_ms or math.huge) then
    return (ends_ms or math.huge) < (best.ends_ms or math.huge)
  end
  return order.is_smaller(id, best.id)
end

-- Of the workers on which the job fits when they are empty, the one whose running jobs end first; nil: none.
local function worker_to_reserve(state, queue, shape)
  local taken, best = {}, nil
  for other, found in pairs(step.reserved) do
    if other ~= queue then taken[found[2]] = true end
  end
  local function consider(id, free, ends_ms)
    if taken[id] or not fits_empty(shape, free.kind) then return end
    if ends_ms and ends_ms <= step.now_ms and not fit.fits(shape, free) then return end
    if is_before(ends_ms, id, best) then best = { id = id, ends_ms = ends_ms } end
  end
  consider(state.worker, state.given, state.ends_ms)
  local others = placement.others(state.choice)
  for position = 1, #others, 2 do
    local other, offer = others[position], others[position + 1]
    if placement.serves(state.choice, other, queue) then consider(other, offer.free, offer.ends_ms) end
  end
  return best
end

-- A job does not fit: reserve a worker for it, if it has waited for long and its queue has no reservation.
function reservation.on_unfit(state, rank, queue, shape)
  local considered = state.considered[queue] or {}
  state.considered[queue] = considered
  if considered[shape] then return end
  considered[shape] = true
  local watched = reservation.watched(state, queue)
  if not watched or not order.is_smaller(rank, watched) then return end
  local tries, id = (state.tries[queue] or 0) + 1, order.id_of_rank(rank)
  state.tries[queue] = tries
  local best = worker_to_reserve(state, queue, shape)
  if best then
    write(queue, { id, best.id, step.now_ms, rank, shape.text })
    if best.id == state.worker then state.hold = { id = id, rank = rank, shape = shape, start_ms = state.ends_ms } end
  else
    write(queue, { '', '', step.now_ms, '', '' })
  end
  if best or tries >= CONSTANTS.max_reserve_tries then state.watched[queue] = false end
end

local function leaves(needed, taken, free)
  return needed == 0 or taken == 0 or free - taken >= needed
end

-- Whether a job leaves all that is free of what the reserved one needs, as far as it needs it.
local function fit_together(reserved, shape, free)
  if reserved.kind ~= 'cpu only' and shape.kind ~= 'cpu only' then return false end
  if not leaves(reserved.cpu_milli, shape.cpu_milli, free.cpu_milli) then return false end
  if not leaves(reserved.memory_bytes, shape.memory_bytes, free.memory_bytes) then return false end
  for name, amount in pairs(shape.custom) do
    if not leaves(reserved.custom[name] or 0, amount, free.custom[name] or 0) then return false end
  end
  return true
end

-- Whether a job that fits is refused because it would delay the job that this worker is reserved for. Then others of its
-- queue and shape are, too. `slots`: free slots, with that of the job.
function reservation.refuses(state, rank, queue, shape, free, slots)
  local of_queue = state.held[queue]
  if of_queue and of_queue[shape] then return true end
  local hold = state.hold
  if not hold or not order.is_smaller(hold.rank, rank) then return false end
  if hold.start_ms then
    local record = records.get(order.id_of_rank(rank))
    local timeout_ms = record and record.timeout_ms
    if timeout_ms and step.now_ms + timeout_ms <= hold.start_ms then return false end
  end
  if slots > 1 and fit_together(hold.shape, shape, free) then return false end
  state.held[queue] = of_queue or {}
  state.held[queue][shape] = true
  return true
end

-- Whether a gang is refused because it would take what is kept free for a job before it.
function reservation.refuses_gang(state, rank)
  return state.hold ~= nil and order.is_smaller(state.hold.rank, rank)
end

-- The workers that are kept free for jobs, as a set.
function reservation.workers()
  local found = {}
  for _, entry in pairs(step.reserved) do found[entry[2]] = true end
  return found
end

function reservation.is_held(state, id) return state.hold ~= nil and state.hold.id == id end

-- A job is taken: it needs no reservation any more. The worker that was reserved claims again; if it is this one, it may
-- have passed over jobs before the reserved one.
function reservation.on_taken(state, queue, id)
  local worker = reservation.release(queue, id)
  if not worker then return end
  state.tries[queue], state.watched[queue] = CONSTANTS.max_reserve_tries, false
  if worker == state.worker then state.hold = nil end
  step.woken_workers[worker] = true
end
