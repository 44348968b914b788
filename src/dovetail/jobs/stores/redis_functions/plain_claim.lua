-- The claim of an idle worker that finds one plain job, or none: the commands that `steps.exchange` ends with for any
-- claim, without its states. On an idle queue this is much of the time until a job starts.

local plain_claim = {}

local plans, plans_cached = {}, 0

-- Names that follow from a request; nil: it has completions, renewals, preemptible jobs or batches, or several queues.
local function make_plan(request)
  local queues = request[6]
  if not request[5] or request[5] <= 0 or queues[2] or not queues[1] then return nil end
  if request[3][1] or request[4][1] or request[8][1] or request[11][1] then return nil end
  local prefix, queue = step.prefix, queues[1]
  return {
    prefix = prefix, worker = request[1], lease_ms = request[2], slots = request[5], queue = queue,
    delay_ms = request[7], ends_in_ms = request[9], due = prefix .. 'due', assigned = prefix .. 'assigned:' .. request[1],
    heads = prefix .. 'heads:' .. queue, heartbeats = prefix .. 'heartbeats', counts = prefix .. 'counts',
    leases = prefix .. 'leases', ready = 'ready:' .. queue, leased = 'leased:' .. queue,
  }
end

-- The plan of a request, or nil and the request. Plans are kept over calls: a function of the request and the prefix.
local function plan_of(text)
  local found = plans[text]
  if found and found.prefix == step.prefix then return found end
  local request = cjson.decode(text)
  local plan = make_plan(request)
  if plan and #text <= CONSTANTS.plain_text_bytes then
    if plans_cached >= CONSTANTS.shapes_cached then
      plans, plans_cached = {}, 0
    end
    plans[text] = plan
    plans_cached = plans_cached + 1
  end
  return plan, request
end

-- Lease the record of the only job that waits, and answer {id, shape, text, payload, token, attempt, timeout_ms, bucket,
-- rank, head}: false if there is none, nil if there are others or it is not plain.
local function lease_only_job(plan, free)
  local heads = redis.call('ZRANGE', plan.heads, '0', '1')
  if not heads[1] then return false end
  if heads[2] then return nil end
  local rank, name = buckets.parse_head(heads[1])
  local shape, bucket = buckets.shape(name), buckets.key(plan.queue, name)
  if buckets.has_ages(name) or shape.ranks > 1 or (free.cards[1] and plan.delay_ms ~= 0) then return nil end
  if not fit.fits(shape, free) or redis.call('ZRANGE', bucket, '0', '1')[2] then return nil end
  local id = order.id_of_rank(rank)
  local fields = redis.call('HMGET', records.key(id), 'm', 's', 'p')
  local token, attempt, timeout_ms
  if fields[1] then token, attempt, timeout_ms = records.write_claimed(id, fields[1], plan.worker) end
  return token and {
    id = id, shape = shape, text = fields[2], payload = fields[3] or '', token = token, attempt = attempt,
    timeout_ms = timeout_ms, bucket = bucket, rank = rank, head = heads[1],
  }
end

-- Change the indexes. Answer the texts and numbers of the job as `claim.finish` does.
local function write_indexes(plan, job)
  local call, id, shape = redis.call, job.id, job.shape.text
  call('ZREM', job.bucket, job.rank)
  call('ZREM', plan.heads, job.head)
  call('ZADD', plan.due, order.number_text(step.now_ms + plan.lease_ms), id)
  call('HDEL', plan.counts, plan.ready)  -- it was the only one
  call('HINCRBY', plan.counts, plan.leased, '1')
  call('HINCRBY', plan.leases, plan.worker, '1')
  local numbers = struct.pack('>i4i4i4i4i4i4', #id, #job.payload, #job.text, #shape, job.token, job.attempt)
  return id .. job.payload .. job.text .. shape, numbers
end

local function free_after(job, free)
  if not job or job.shape.is_plain then return free.text end
  local left = fit.copy(free)
  fit.take(job.shape, left)
  return fit.text(left)
end

-- Answer whether the claim was made, then whether the worker is registered, when the next job is due, and the texts and
-- numbers of the claimed job. If it was not made: false, and the request if it was read.
function plain_claim.run(text, free_text)
  local plan, request = plan_of(text)
  if not plan or next(step.queues) or next(step.reserved) then return false, request end
  local due_ms = tonumber(redis.call('ZRANGE', plan.due, '0', '0', 'WITHSCORES')[2] or nil) or math.huge
  if due_ms <= step.now_ms or redis.call('SMEMBERS', plan.assigned)[1] then return false, request end
  local free = fit.free(free_text)
  local job = lease_only_job(plan, free)
  if job == nil then return false, request end
  step.is_unused = true
  local now_ms, ends_ms, slots, texts, numbers = step.now_ms, plan.ends_in_ms, plan.slots, '', ''
  ends_ms = ends_ms and now_ms + ends_ms
  if job then
    texts, numbers = write_indexes(plan, job)
    ends_ms = ends_ms and job.timeout_ms and math.max(ends_ms, now_ms + job.timeout_ms)
    slots, due_ms = slots - 1, math.min(due_ms, now_ms + plan.lease_ms)
  end
  local known = offers.renew_heartbeat(plan.worker)
  if known == 1 then offers.put(plan.worker, now_ms, plan.lease_ms, slots, free_after(job, free), ends_ms or false) end
  return true, known, due_ms, texts, numbers
end
