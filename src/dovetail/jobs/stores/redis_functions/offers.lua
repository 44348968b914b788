-- What live workers can take: their offers.

local offers = {}

-- `ends_ms`: false if it is not known.
function offers.put(worker, offered_ms, lease_ms, slots, text, ends_ms)
  redis.call('HSET', step.prefix .. 'offers', worker, cmsgpack.pack(offered_ms, lease_ms, slots, text, ends_ms))
end

-- The other registered workers whose latest claim is not older than a lease, by id: {id, queues, slots, free,
-- offered_ms, lease_ms}.
function offers.others(worker)
  local rows, found = redis.call('HGETALL', step.prefix .. 'offers'), {}
  for position = 1, #rows, 2 do
    local id = rows[position]
    local offered_ms, lease_ms, slots, text = cmsgpack.unpack(rows[position + 1])
    local about = id ~= worker and offered_ms >= step.now_ms - lease_ms and redis.call('HGET', step.prefix .. 'workers', id)
    if about then
      local _, names = cmsgpack.unpack(about)
      local queues = {}
      for _, queue in ipairs(names) do queues[queue] = true end
      found[#found + 1] = {
        id = id, queues = queues, slots = slots, free = fit.free(text),
        offered_ms = offered_ms, lease_ms = lease_ms,
      }
    end
  end
  table.sort(found, function(a, b) return order.is_smaller(a.id, b.id) end)
  return found
end

-- The worker is alive: 1, or 0 if it is not registered.
function offers.renew_heartbeat(worker)
  local key = step.prefix .. 'heartbeats'
  local is_changed = redis.call('ZADD', key, 'XX', 'CH', order.number_text(step.now_ms), worker) == 1
  return (is_changed or redis.call('ZSCORE', key, worker)) and 1 or 0
end
