-- Running jobs of queues against their limits and weights: `QueueShares` of `queue_shares.py`.

local shares = {}

local UNWEIGHTED = ''

local function leased_jobs(queue)
  local field = 'leased:' .. queue
  return tonumber(redis.call('HGET', step.prefix .. 'counts', field) or 0) + (step.counts[field] or 0)
end

-- State of a claim that serves these queues; nil if none of them has a weight or a limit.
function shares.start(queues)
  local weights, limits = {}, {}
  for _, queue in ipairs(queues) do
    local settings = step.queues[queue]
    if settings then
      weights[queue], limits[queue] = settings[2] or nil, settings[3] or nil
    end
  end
  local has_weights = next(weights) ~= nil
  if not (has_weights or next(limits)) then return nil end
  local state = { weights = weights, limits = limits, running = {}, of_group = {} }
  for _, queue in ipairs(queues) do
    if has_weights or limits[queue] then
      local group = weights[queue] and queue or UNWEIGHTED
      state.running[queue] = leased_jobs(queue)
      state.of_group[group] = (state.of_group[group] or 0) + state.running[queue]
    end
  end
  return state
end

-- Queues of one group are served in the order of their jobs.
function shares.group_of(state, queue)
  return state and state.weights[queue] and queue or UNWEIGHTED
end

function shares.is_full(state, queue)
  local limit = state and state.limits[queue]
  return limit and state.running[queue] >= limit
end

-- A job of the queue is claimed.
function shares.count(state, queue)
  if state and state.running[queue] then
    local group = shares.group_of(state, queue)
    state.running[queue], state.of_group[group] = state.running[queue] + 1, state.of_group[group] + 1
  end
end

-- Running jobs per weight.
function shares.use(state, group)
  return (state.of_group[group] or 0) / (state.weights[group] or 1)
end
