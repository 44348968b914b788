-- Submission of one job that is ready at once, has priority 0 and neither a key nor dependencies: the commands that
-- `steps.submit` ends with for any jobs, without a record. On an idle queue this is much of the time until it starts.

local plain_submission = {}

local plans, plans_cached = {}, 0

-- Names that follow from a specification; false: the job is not plain.
local function make_plan(text)
  local spec = records.read_spec(text)
  if spec.key or spec.after[1] or spec.priority ~= 0 or spec.at_ms > 0 or spec.delay_ms > 0 then return false end
  local prefix, queue, name = step.prefix, spec.queue, '=' .. fit.shape(spec.shape).text
  return {
    prefix = prefix, queue = queue, timeout_ms = spec.timeout_ms, bucket_name = name, bucket = buckets.key(queue, name),
    heads = prefix .. 'heads:' .. queue, readers = prefix .. 'readers:' .. queue, counted = 'ready:' .. queue,
    ids = prefix .. 'ids', counts = prefix .. 'counts', wake = prefix .. 'wake:',
  }
end

-- Kept over calls: a function of the specification and the prefix.
local function plan_of(text)
  local found = plans[text]
  if found == nil or (found and found.prefix ~= step.prefix) then
    found = make_plan(text)
    if plans_cached >= CONSTANTS.shapes_cached then
      plans, plans_cached = {}, 0
    end
    plans[text] = found
    plans_cached = plans_cached + 1
  end
  return found
end

-- Whether the job is stored now: nil if it is not plain, false if the store has it.
function plain_submission.run(id, text, payload)
  if #text > CONSTANTS.plain_text_bytes then return nil end
  local plan = plan_of(text)
  if not plan then return nil end
  local call, rank = redis.call, order.rank(step.now_ms, id)
  step.is_unused = true
  if call('ZADD', plan.ids, 'NX', '0', id) == 0 then return false end
  local first = call('ZRANGE', plan.bucket, '0', '0')[1]
  call('ZADD', plan.bucket, '0', rank)
  if not first or order.is_smaller(rank, first) then
    if first then call('ZREM', plan.heads, buckets.head(first, plan.bucket_name)) end
    call('ZADD', plan.heads, '0', buckets.head(rank, plan.bucket_name))
  end
  local data = records.encode_ready(plan.queue, #payload, plan.timeout_ms)
  if payload == '' then
    call('HSET', records.key(id), 's', text, 'm', data)
  else
    call('HSET', records.key(id), 's', text, 'm', data, 'p', payload)
  end
  call('HINCRBY', plan.counts, plan.counted, '1')
  local readers = call('SMEMBERS', plan.readers)
  for position = 1, #readers do call('ZADD', plan.wake .. readers[position], 'NX', '0', '') end
  return true
end
