-- Whether another worker should rather run a job that fits: `claim_policy.py`.

local placement = {}

local function rank_of(shape, free)
  if shape.kind == 'cpu only' then return free.cards[1] and 1 or 0, 0 end
  local idle_milli = 0
  for _, card in ipairs(free.cards) do idle_milli = idle_milli + card.milli end
  return idle_milli, free.cpu_milli
end

local function is_lower(idle, cpus, other_idle, other_cpus)
  return idle < other_idle or (idle == other_idle and cpus < other_cpus)
end

-- Live offers of the other workers, with what this claim leaves to them.
local function read_others(worker)
  local found, others = redis.call('HGETALL', step.prefix .. 'offers'), {}
  for position = 1, #found, 2 do
    if found[position] ~= worker then
      local offered_ms, lease_ms, slots, text = cmsgpack.unpack(found[position + 1])
      if slots > 0 and offered_ms >= step.now_ms - lease_ms then
        others[#others + 1] = { id = found[position], slots = slots, free = fit.free(text) }
      end
    end
  end
  return others
end

-- State of a claim; `delay_ms` 0: it leaves nothing to others.
function placement.start(worker, delay_ms)
  return { worker = worker, delay_ms = delay_ms, readers = {}, left = {}, until_ms = math.huge }
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

-- The worker with the lowest rank, then the smallest id, for a job that fits it; nil: none is below this worker's.
local function best_before(state, free, queue, shape)
  local idle, cpus = rank_of(shape, free)
  local found
  state.others = state.others or read_others(state.worker)
  for _, other in ipairs(state.others) do
    if other.slots > 0 then
      local other_idle, other_cpus = rank_of(shape, other.free)
      local is_better = is_lower(other_idle, other_cpus, idle, cpus)
      if not is_better and found and other_idle == idle and other_cpus == cpus then
        is_better = order.is_smaller(other.id, found.id)
      end
      if is_better and readers_of(state, queue)[other.id] and fit.fits(shape, other.free) then
        idle, cpus, found = other_idle, other_cpus, other
      end
    end
  end
  return found
end

function placement.forget_passes()
  local before_ms = string.format('%.0f', step.now_ms - CONSTANTS.pass_kept_ms)
  redis.call('ZREMRANGEBYSCORE', step.prefix .. 'passes', '-inf', '(' .. before_ms)
end

-- When a job is taken by any worker, if it was passed over.
local function pass(state, id)
  local key = step.prefix .. 'passes'
  local passed_ms = tonumber(redis.call('ZSCORE', key, id) or nil)
  if not passed_ms or passed_ms < step.now_ms - CONSTANTS.pass_kept_ms then
    passed_ms = step.now_ms
    redis.call('ZADD', key, records.time_text(passed_ms), id)
    placement.forget_passes()
  end
  return passed_ms + state.delay_ms
end

-- Whether the claim passes over a job that fits, and wakes a worker that should rather run it. Then it passes over the
-- other jobs of this queue and shape, too.
function placement.leaves(state, id, queue, shape, free)
  if state.delay_ms == 0 or not free.cards[1] then return false end
  local left = state.left[shape]
  if left and left[queue] then return true end
  if not fit.fits(shape, free) then return false end
  local better = best_before(state, free, queue, shape)
  if not better then return false end
  local until_ms = pass(state, id)
  if until_ms <= step.now_ms then return false end
  better.slots, better.free = better.slots - 1, fit.copy(better.free)
  fit.take(shape, better.free)
  step.woken_workers[better.id] = true
  state.until_ms = math.min(state.until_ms, until_ms)
  state.left[shape] = left or {}
  state.left[shape][queue] = true
  return true
end
