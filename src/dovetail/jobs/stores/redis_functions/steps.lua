-- The steps of the store, one function each.

local steps = {}

-- --- waking

-- The keys of workers that are forgotten are deleted, so there are no more of them than workers.
local function wake(worker)
  redis.call('ZADD', step.prefix .. 'wake:' .. worker, 'NX', '0', '')
end

-- Wake what waits for the effects of this step, but not the worker whose exchange it is.
local function publish(worker)
  for _, id in ipairs(step.finished) do redis.call('PUBLISH', step.prefix .. 'finished:' .. id, '') end
  local woken = step.woken_workers
  for queue in pairs(step.woken_queues) do
    for _, reader in ipairs(redis.call('SMEMBERS', step.prefix .. 'readers:' .. queue)) do
      if reader ~= worker then woken[reader] = true end
    end
  end
  if step.wakes_all then
    for _, reader in ipairs(redis.call('ZRANGE', step.prefix .. 'heartbeats', 0, -1)) do woken[reader] = true end
  end
  for reader in pairs(woken) do wake(reader) end
end

local function finish_step(worker)
  buckets.write()
  records.write()
  publish(worker)
end

-- Arguments after the time.
local function rest(arguments)
  local found = {}
  for position = 2, #arguments do found[position - 1] = arguments[position] end
  return found
end

-- --- jobs

-- The first reason not to store a job, as a receipt; nil: there is none.
local function refusal_of(id, spec)
  if records.get(id) then return { id, 0, {} } end
  if spec.key then
    local known = step.new_keys[spec.key] or redis.call('HGET', step.prefix .. 'keys', spec.key)
    if known then return { known, 0, {} } end
  end
  local missing, seen = {}, {}
  for _, other in ipairs(spec.after) do
    if not seen[other] then
      seen[other] = true
      if not records.get(other) then missing[#missing + 1] = other end
    end
  end
  if missing[1] then return { id, 0, missing } end
  return nil
end

-- Jobs of a list that have not succeeded, each once, and the first of them that has ended.
local function unmet_of(after)
  local unmet, failed, seen = {}, nil, {}
  for _, other in ipairs(after) do
    local record = not seen[other] and records.get(other)
    seen[other] = true
    if record and record.state ~= 'succeeded' then
      unmet[#unmet + 1] = other
      if FINISHED[record.state] then failed = failed or other end
    end
  end
  return unmet, failed
end

local function submit(id, text, payload, spec)
  local refusal = refusal_of(id, spec)
  if refusal then return refusal end
  if spec.key then
    step.new_keys[spec.key] = id
    redis.call('HSET', step.prefix .. 'keys', spec.key, id)
  end
  local unmet, failed = unmet_of(spec.after)
  local record = records.create(id, text, payload, spec)
  machine.submit(record, unmet, failed)
  machine.put(record)
  return { id, 1, {} }
end

-- Arguments from `first` on: id, specification and payload of each job. All are read before anything is written.
local function submit_all(arguments, first)
  local specs, receipts = {}, {}
  for position = first, #arguments, 3 do
    local spec = records.read_spec(arguments[position + 1])
    fit.shape(spec.shape)
    specs[position] = spec
  end
  step.new_keys = {}
  for position = first, #arguments, 3 do
    receipts[#receipts + 1] = submit(arguments[position], arguments[position + 1], arguments[position + 2], specs[position])
  end
  return receipts
end

function steps.submit(arguments)
  if #arguments == 4 then
    local is_stored = plain_submission.run(arguments[2], arguments[3], arguments[4])
    if is_stored ~= nil then return { { arguments[2], is_stored and 1 or 0, {} } } end
  end
  local receipts = submit_all(arguments, 2)
  finish_step()
  return receipts
end

-- Submit the jobs of messages that are still at the right end of a foreign list, and take these messages from it.
-- Arguments: the list, the list of rejected messages, how many messages there are and how many entries for rejected
-- ones, the messages from left to right, the entries, and jobs as for `submit`. False: the list has changed. If it is
-- repeated because its answer was lost, the first job is there already, and nothing changes.
function steps.ingest(arguments)
  local list, rejected = arguments[2], arguments[3]
  local count, first_entry = tonumber(arguments[4]), 6 + tonumber(arguments[4])
  local first_job = first_entry + tonumber(arguments[5])
  if arguments[first_job] and records.get(arguments[first_job]) then return 1 end
  local messages = redis.call('LRANGE', list, -count, -1)
  if #messages ~= count then return 0 end
  for position = 1, count do
    if messages[position] ~= arguments[5 + position] then return 0 end
  end
  submit_all(arguments, first_job)
  redis.call('LTRIM', list, 0, -(count + 1))
  for position = first_entry, first_job - 1 do redis.call('LPUSH', rejected, arguments[position]) end
  finish_step()
  return 1
end

function steps.cancel(arguments)
  local states = {}
  for position = 3, #arguments do
    local record = records.get(arguments[position])
    if record and not FINISHED[record.state] then
      local reserved = record.state == 'ready' and reservation.release(record.queue, record.id)
      if reserved then step.woken_workers[reserved] = true end
      machine.cancel(record, arguments[2])
      machine.put(record)
      machine.wake_workers(record)
    end
    states[#states + 1] = record and record.state
  end
  finish_step()
  return states
end

function steps.requeue(arguments)
  local states = {}
  for position = 2, #arguments do
    local record = records.get(arguments[position])
    if record and REQUEUEABLE[record.state] then
      local unmet = unmet_of(records.spec(record).after)
      machine.requeue(record, unmet)
      machine.put(record)
    end
    states[#states + 1] = record and record.state
  end
  finish_step()
  return states
end

function steps.purge(arguments)
  local request = cjson.decode(arguments[2])
  local answer = purge.run(lookup.filter(request[1]), request[2], request[3], request[4])
  placement.forget_deferrals()
  reservation.forget_tries()
  finish_step()
  return answer
end

function steps.get(arguments)
  return lookup.get(rest(arguments))
end

function steps.find(arguments)
  local request = cjson.decode(arguments[2])
  return lookup.find(lookup.filter(request[1]), request[2], request[3])
end

function steps.id_of_key(arguments)
  return redis.call('HGET', step.prefix .. 'keys', arguments[2])
end

function steps.finished(arguments)
  return lookup.watch(rest(arguments), false)
end

function steps.watch(arguments)
  local found = lookup.watch(rest(arguments), true)
  finish_step()
  return found
end

-- --- workers

local function forget_worker(worker)
  local text = redis.call('HGET', step.prefix .. 'workers', worker)
  if text then
    local _, queues = cmsgpack.unpack(text)
    for _, queue in ipairs(queues) do redis.call('SREM', step.prefix .. 'readers:' .. queue, worker) end
  end
  redis.call('HDEL', step.prefix .. 'workers', worker)
  redis.call('HDEL', step.prefix .. 'offers', worker)
  redis.call('ZREM', step.prefix .. 'heartbeats', worker)
end

function steps.register_worker(arguments)
  local worker, text, queues = arguments[2], arguments[3], cjson.decode(arguments[4])
  local before_ms = step.now_ms - CONSTANTS.worker_forgotten_ms
  local old = redis.call('ZRANGE', step.prefix .. 'heartbeats', '-inf', '(' .. string.format('%.0f', before_ms), 'BYSCORE')
  for _, other in ipairs(old) do
    if not redis.call('HGET', step.prefix .. 'leases', other) then
      forget_worker(other)
      redis.call('DEL', step.prefix .. 'wake:' .. other)
    end
  end
  forget_worker(worker)
  redis.call('HSET', step.prefix .. 'workers', worker, cmsgpack.pack(step.now_ms, queues, text))
  redis.call('ZADD', step.prefix .. 'heartbeats', step.now_ms, worker)
  for _, queue in ipairs(queues) do redis.call('SADD', step.prefix .. 'readers:' .. queue, worker) end
end

function steps.remove_worker(arguments)
  forget_worker(arguments[2])
  redis.call('DEL', step.prefix .. 'wake:' .. arguments[2])
end

function steps.workers()
  local found, workers = redis.call('HGETALL', step.prefix .. 'workers'), {}
  for position = 1, #found, 2 do
    local worker = found[position]
    local registered_ms, _, text = cmsgpack.unpack(found[position + 1])
    local offer = redis.call('HGET', step.prefix .. 'offers', worker)
    workers[#workers + 1] = {
      worker, text, registered_ms, tonumber(redis.call('ZSCORE', step.prefix .. 'heartbeats', worker)),
      tonumber(redis.call('HGET', step.prefix .. 'leases', worker) or 0), offer and { cmsgpack.unpack(offer) },
    }
  end
  return workers
end

-- --- exchange

-- Rows of completions: job, token, outcome, size of the result (false: none) and its encoding, and if anything else is
-- given, all that is below. Results follow each other in `results`.
local function read_completions(rows, results)
  local completions, offset = {}, 0
  for number, row in ipairs(rows) do
    local size = row[4]
    local completion = { job_id = row[1], token = row[2], outcome = row[3], encoding = row[5] }
    if size then
      completion.result = string.sub(results, offset + 1, offset + size)
      offset = offset + size
    end
    if row[6] ~= nil then
      completion.error, completion.traceback, completion.final = row[6] or nil, row[7] or nil, row[8]
      completion.jitter, completion.shape = row[9], row[10] or nil
      completion.exit_code, completion.cpu_ms, completion.peak_memory_bytes = row[11], row[12], row[13]
    end
    completion.rank = row[14] or 0
    completions[number] = completion
  end
  return completions
end

local function complete(worker, completion, refused)
  local record = records.get_with_attempts(completion.job_id)
  if record and record.state == 'leased' and record.token == completion.token then
    if not machine.has_member(record, worker, completion.rank) then
      refused[#refused + 1] = completion.job_id
      refused[#refused + 1] = completion.token
      return
    end
    if machine.has_ended(record, completion.rank) then return end
    if record.preempted_for then step.preemptors[record.preempted_for] = true end
    machine.complete(record, completion)
    machine.put(record)
  elseif not (record and machine.is_repeated(record, worker, completion.token, completion.outcome)) then
    refused[#refused + 1] = completion.job_id
    refused[#refused + 1] = completion.token
  end
end

local function renew(worker, row, lease_ms, refused, cancelled, preempted)
  local record = records.get(row[1])
  if not (record and record.state == 'leased' and record.token == row[2]) then
    refused[#refused + 1] = row[1]
    refused[#refused + 1] = row[2]
    return
  end
  record.due_ms = step.now_ms + lease_ms
  if record.gang then
    machine.renew_gang(record, worker, record.due_ms)
    records.change(record)
  end
  step.due[record.id] = order.number_text(record.due_ms)
  if row[3] or row[4] then
    records.set(record, 'progress', row[3] or record.progress)
    records.set(record, 'message', row[4] or record.message)
    records.change(record)
  end
  if record.cancel_requested then cancelled[#cancelled + 1] = record.id end
  if record.preempted_for then preempted[#preempted + 1] = record.id end
end

local function first_due_ms()
  return tonumber(redis.call('ZRANGE', step.prefix .. 'due', '0', '0', 'WITHSCORES')[2])
end

-- Expired leases, and scheduled jobs whose time has come. Answer when the next one is due, if there was none.
local function handle_due()
  local first_ms = first_due_ms()
  if not first_ms or first_ms > step.now_ms then return first_ms or math.huge end
  local now = order.number_text(step.now_ms)
  local ids = redis.call('ZRANGE', step.prefix .. 'due', '-inf', now, 'BYSCORE', 'LIMIT', 0, CONSTANTS.due_per_step)
  for _, id in ipairs(ids) do
    local record = records.get(id)
    if not record then
      redis.call('ZREM', step.prefix .. 'due', id)
    elseif record.state == 'scheduled' then
      machine.promote(record)
      machine.put(record)
    elseif record.state == 'leased' then
      machine.complete(record, { outcome = 'lost', error = CONSTANTS.lease_expired, rank = machine.expired_rank(record) })
      machine.put(record)
    end
  end
  return nil
end

local function due_schedules()
  local due = {}
  if not step.fire_ms or step.fire_ms > step.now_ms then return due end
  local found = redis.call('ZRANGE', step.prefix .. 'fires', '-inf', step.now_ms, 'BYSCORE', 'WITHSCORES')
  for position = 1, #found, 2 do
    local text = redis.call('HGET', step.prefix .. 'schedules', found[position])
    due[#due + 1] = { found[position], text, tonumber(found[position + 1]) }
  end
  return due
end

-- When the next schedule fires, the next scheduled job is due or a lease expires; false: never.
local function next_ms(due_ms)
  if step.fire_ms then due_ms = math.min(due_ms, step.fire_ms) end
  return due_ms < math.huge and due_ms
end

-- Keep what a worker can take after its claim.
local function put_offer(worker, lease_ms, slots, free, ends_ms)
  offers.put(worker, step.now_ms, lease_ms, slots, not free.is_changed and free.text or fit.text(free), ends_ms)
end

local function exchange(request, results, free_text)
  local worker, lease_ms = request[1], request[2]
  local completions = read_completions(request[3], results)
  local free = request[5] and fit.free(free_text)
  local refused, cancelled, preempted = {}, {}, {}
  for _, completion in ipairs(completions) do complete(worker, completion, refused) end
  for _, row in ipairs(request[4]) do renew(worker, row, lease_ms, refused, cancelled, preempted) end
  local known = offers.renew_heartbeat(worker)
  if not request[5] then
    finish_step(worker)
    return { step.now_ms, known, false, refused, cancelled, preempted, {}, '', '', {} }
  end
  records.write_due()
  local due_ms = handle_due()
  buckets.write()
  local members = {}
  local slots, free = gangs.send(worker, request[5], free, lease_ms, members)
  if members[1] then due_ms = nil end  -- the leases of their gangs may end later now
  local served, candidates = claim.served_queues(request[6]), preemption.candidates(worker, request[8])
  local share = shares.start(served)
  local claimed = claim.start(worker, lease_ms, request[9])
  claim.fill(claimed, request[11], served, share)
  local kept = preemption.kept_room(slots, free, served, share, candidates)
  local left, slots_left, until_ms = claim.run(claimed, slots, free, served, request[7], share, kept, request[10], members)
  local texts, numbers, ends_ms = claim.finish(claimed, members)
  if candidates[1] then
    kept = preemption.request(worker, kept, slots_left, left, served, share, candidates, preempted)
  end
  if known == 1 then put_offer(worker, lease_ms, kept and kept.waiting[1] and 0 or slots_left, left, ends_ms) end
  finish_step(worker)
  if not due_ms then
    due_ms = first_due_ms() or math.huge
  elseif texts[1] or members[1] then
    due_ms = math.min(due_ms, step.now_ms + lease_ms)
  end
  due_ms = math.min(due_ms, until_ms)
  return {
    step.now_ms, known, next_ms(due_ms), refused, cancelled, preempted, due_schedules(), table.concat(numbers),
    table.concat(texts), members,
  }
end

-- Arguments: clock, request (JSON: worker, lease_ms, completions, renewals, and if there is a claim: slots, queues,
-- placement delay, preemptible jobs, when the jobs end, address of rank 0 of a gang, batches), results, free vector. See
-- `redis_codec.py` for the rows and the answer.
function steps.exchange(arguments)
  local is_made, known, due_ms, texts, numbers = plain_claim.run(arguments[2], arguments[4])
  if is_made then
    return { step.now_ms, known, next_ms(due_ms), {}, {}, {}, due_schedules(), numbers, texts, {} }
  end
  return exchange(known or cjson.decode(arguments[2]), arguments[3], arguments[4])
end

-- --- queues and schedules

local function put_settings(queue, paused, weight, max_running)
  local settings = {}
  for other, of_other in pairs(step.queues) do settings[other] = of_other end
  settings[queue] = (paused or weight or max_running) and { paused, weight, max_running } or nil
  if next(settings) then
    redis.call('HSET', step.prefix .. 'meta', 'queues', cmsgpack.pack(settings))
  else
    redis.call('HDEL', step.prefix .. 'meta', 'queues')
  end
  publish()
end

local function settings_of(queue)
  return step.queues[queue] or { false, false, false }
end

-- Rows of queue, job, worker, and when the reservation was made.
function steps.reservations()
  local found = {}
  for queue, of_queue in pairs(step.reserved) do
    if of_queue[1] ~= '' then found[#found + 1] = { queue, of_queue[1], of_queue[2], of_queue[3] } end
  end
  return found
end

-- Arguments: clock, queue, '1' or '0'.
function steps.set_paused(arguments)
  local before, paused = settings_of(arguments[2]), arguments[3] == '1'
  -- a worker that is reserved for a job of a paused queue takes others
  step.wakes_all = not paused or step.reserved[arguments[2]] ~= nil
  put_settings(arguments[2], paused, before[2], before[3])
end

-- Arguments: clock, queue, weight, max_running; "": none.
function steps.set_limits(arguments)
  step.wakes_all = true
  put_settings(
    arguments[2], settings_of(arguments[2])[1], tonumber(arguments[3]) or false, tonumber(arguments[4]) or false)
end

-- Answer: counts of states (STATE:QUEUE, number ...), settings of queues (queue, paused, weight, max_running), and queue,
-- name, jobs and earliest enqueued_ms of each bucket.
function steps.stats()
  local counts, found = redis.call('HGETALL', step.prefix .. 'counts'), {}
  for position = 1, #counts, 2 do
    local queue = string.match(counts[position], '^ready:(.*)$')
    if queue then
      for _, head in ipairs(redis.call('ZRANGE', step.prefix .. 'heads:' .. queue, 0, -1)) do
        local name = buckets.name_of_head(head)
        local jobs = redis.call('ZCARD', buckets.key(queue, name))
        found[#found + 1] = { queue, buckets.shape(name).text, jobs, buckets.oldest_ms(queue, name) }
      end
    end
  end
  local settings = {}
  for queue, of_queue in pairs(step.queues) do
    settings[#settings + 1] = { queue, of_queue[1] and 1 or 0, of_queue[2], of_queue[3] }
  end
  return { counts, settings, found }
end

-- Keep the next fire time of all schedules beside the version, which every step reads.
local function write_fire_time()
  local first = redis.call('ZRANGE', step.prefix .. 'fires', 0, 0, 'WITHSCORES')
  if first[2] then
    redis.call('HSET', step.prefix .. 'meta', 'fire', first[2])
  else
    redis.call('HDEL', step.prefix .. 'meta', 'fire')
  end
end

function steps.put_schedule(arguments)
  local name, text, time_ms = arguments[2], arguments[3], arguments[4]
  if redis.call('HGET', step.prefix .. 'schedules', name) == text then return end
  redis.call('HSET', step.prefix .. 'schedules', name, text)
  redis.call('ZADD', step.prefix .. 'fires', time_ms, name)
  write_fire_time()
  step.wakes_all = true
  publish()
end

function steps.remove_schedule(arguments)
  local found = redis.call('HDEL', step.prefix .. 'schedules', arguments[2])
  redis.call('ZREM', step.prefix .. 'fires', arguments[2])
  write_fire_time()
  return found
end

function steps.schedules()
  local found, schedules = redis.call('HGETALL', step.prefix .. 'schedules'), {}
  for position = 1, #found, 2 do
    local name = found[position]
    schedules[#schedules + 1] = { name, found[position + 1], tonumber(redis.call('ZSCORE', step.prefix .. 'fires', name)) }
  end
  return schedules
end

-- Arguments: clock, name, fire_ms, next_ms, and id, specification and payload of the job.
function steps.fire(arguments)
  local name = arguments[2]
  local fires = step.prefix .. 'fires'
  if tonumber(redis.call('ZSCORE', fires, name) or nil) ~= tonumber(arguments[3]) then return false end
  local receipts = submit_all(arguments, 5)
  redis.call('ZADD', fires, arguments[4], name)
  write_fire_time()
  finish_step()
  return receipts[1]
end

function steps.now()
  return step.now_ms
end
