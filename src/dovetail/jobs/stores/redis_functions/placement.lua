-- Whether another worker should rather run a job that fits: `worker_choice.py`.

local placement = {}

local STRANDED = 2 ^ 20
-- Weight of stranded GPU in a rank: above the idle GPU of any worker.

-- Two numbers: stranded GPU that the job adds with idle GPU, and free CPUs. `fit.take` forgets `idle_milli`.
local function rank_of(shape, free)
  local cards = #free.cards
  if cards == 0 then return -STRANDED, 0 end
  if shape.kind == 'cpu only' and shape.cpu_milli == 0 then return 0, 0 end
  local idle_milli, cpu_milli, cards_milli = free.idle_milli, free.cpu_milli, 1000 * cards
  local of_cpu_milli = math.max(1, free.kind.cpu_milli)
  if not idle_milli then
    idle_milli = 0
    for _, card in ipairs(free.cards) do idle_milli = idle_milli + card.milli end
    free.idle_milli = idle_milli
    free.stranded_milli = math.max(0, idle_milli - math.floor(cpu_milli * cards_milli / of_cpu_milli))
  end
  local served = math.floor((cpu_milli - shape.cpu_milli) * cards_milli / of_cpu_milli)
  local stranded_milli = math.max(0, idle_milli - shape.cards * shape.gpu_milli - served)
  return (stranded_milli - free.stranded_milli) * STRANDED + idle_milli, cpu_milli
end

local function is_lower(idle, cpus, other_idle, other_cpus)
  return idle < other_idle or (idle == other_idle and cpus < other_cpus)
end

local parsed_offers, offers_cached = {}, 0

-- An offer by its text. Kept over calls, and never changed.
local function offer_of(text)
  local found = parsed_offers[text]
  if found then return found end
  local offered_ms, lease_ms, slots, free, ends_ms = cmsgpack.unpack(text)
  found = {
    offered_ms = offered_ms, live_until_ms = offered_ms + lease_ms, slots = slots, free = fit.free(free), ends_ms = ends_ms,
  }
  if offers_cached >= CONSTANTS.free_vectors_cached then
    parsed_offers, offers_cached = {}, 0
  end
  parsed_offers[text] = found
  offers_cached = offers_cached + 1
  return found
end

-- Live offers of the other workers: worker, offer, worker, offer, ...
local function read_others(worker)
  local found, others, now_ms = redis.call('HGETALL', step.prefix .. 'offers'), {}, step.now_ms
  local count = 0
  for position = 1, #found, 2 do
    local other = found[position]
    if other ~= worker then
      local offer = offer_of(found[position + 1])
      if offer.live_until_ms >= now_ms then
        others[count + 1], others[count + 2] = other, offer
        count = count + 2
      end
    end
  end
  return others
end

-- State of a claim; `delay_ms` 0: it leaves nothing to others. `slots` and `free`: of workers to which it left jobs.
function placement.start(worker, delay_ms)
  return { worker = worker, delay_ms = delay_ms, readers = {}, left = {}, slots = {}, free = {}, until_ms = math.huge }
end

local function readers_of(state, queue)
  local readers = state.readers[queue]
  if not readers then
    readers = {}
    for _, reader in ipairs(redis.call('SMEMBERS', step.prefix .. 'readers:' .. queue)) do readers[reader] = true end
    state.readers[queue] = readers
  end
  return readers
end

-- The offers have changed.
function placement.forget_others(state)
  state.others, state.slots, state.free = nil, {}, {}
end

function placement.others(state)
  state.others = state.others or read_others(state.worker)
  return state.others
end

-- Whether a worker has a live offer.
function placement.is_live(state, worker)
  if worker == state.worker then return true end
  local text = redis.call('HGET', step.prefix .. 'offers', worker)
  return text and offer_of(text).live_until_ms >= step.now_ms
end

function placement.serves(state, worker, queue) return readers_of(state, queue)[worker] end

-- Whether a worker is before another one of the same rank: `Turn` of `offer_groups.py`.
local function has_turn_before(slots, offered_ms, worker, other_slots, other_ms, other)
  if slots ~= other_slots then return slots > other_slots end
  if offered_ms ~= other_ms then return offered_ms < other_ms end
  return order.is_smaller(worker, other)
end

-- The worker with the lowest rank, then the first in turn, for a job that fits it, with its slots and free resources;
-- nil: none is below this worker's.
local function best_before(state, free, queue, shape)
  local idle, cpus = rank_of(shape, free)
  local found, found_slots, found_free, found_ms
  local others, slots_left, free_left = placement.others(state), state.slots, state.free
  for position = 1, #others, 2 do
    local other, offer = others[position], others[position + 1]
    local other_slots = slots_left[other] or offer.slots
    if other_slots > 0 then
      local other_free = free_left[other] or offer.free
      local other_idle, other_cpus = rank_of(shape, other_free)
      local is_better = is_lower(other_idle, other_cpus, idle, cpus)
      if not is_better and found and other_idle == idle and other_cpus == cpus then
        is_better = has_turn_before(other_slots, offer.offered_ms, other, found_slots, found_ms, found)
      end
      if is_better and readers_of(state, queue)[other] and fit.fits(shape, other_free) then
        idle, cpus, found, found_slots, found_free = other_idle, other_cpus, other, other_slots, other_free
        found_ms = offer.offered_ms
      end
    end
  end
  return found, found_slots, found_free
end

function placement.forget_deferrals()
  local before_ms = string.format('%.0f', step.now_ms - CONSTANTS.deferral_kept_ms)
  redis.call('ZREMRANGEBYSCORE', step.prefix .. 'deferrals', '-inf', '(' .. before_ms)
end

-- When a job is taken by any worker, if it was passed over.
local function pass(state, id)
  local key = step.prefix .. 'deferrals'
  local deferred_ms = tonumber(redis.call('ZSCORE', key, id) or nil)
  if not deferred_ms or deferred_ms < step.now_ms - CONSTANTS.deferral_kept_ms then
    deferred_ms = step.now_ms
    redis.call('ZADD', key, order.number_text(deferred_ms), id)
    placement.forget_deferrals()
  end
  return deferred_ms + state.delay_ms
end

-- Whether the claim has left a job of this queue and shape to another worker.
function placement.has_left(state, queue, shape)
  local left = state.left[shape]
  return left and left[queue]
end

-- Whether the claim passes over a job that fits, and wakes a worker that should rather run it. Then it passes over the
-- other jobs of this queue and shape, too.
function placement.leaves(state, id, queue, shape, free)
  if state.delay_ms == 0 or not free.cards[1] then return false end
  local better, slots, better_free = best_before(state, free, queue, shape)
  if not better then return false end
  local until_ms = pass(state, id)
  if until_ms <= step.now_ms then return false end
  better_free = fit.copy(better_free)
  fit.take(shape, better_free)
  state.slots[better], state.free[better] = slots - 1, better_free
  step.woken_workers[better] = true
  state.until_ms = math.min(state.until_ms, until_ms)
  state.left[shape] = state.left[shape] or {}
  state.left[shape][queue] = true
  return true
end
