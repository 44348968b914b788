-- The step that runs now, and its records: read once, changed in memory, and written at the end of the step.
--
-- Keys, all behind the prefix "{dovetail}:" (KEYS[1]):
--   meta            hash: version, fire (the next fire time of all schedules), queues: msgpack({queue: {paused, weight or
--                   false, max_running or false}}) of those with settings, and reserved: msgpack(`step.reserved`)
--   job:ID          hash: s specification (JSON), p payload, m what has happened (`encode`), a ended attempts, r result
--   ids             sorted set of all ids, by their bytes
--   keys            hash: idempotency key -> id
--   due             sorted set: id -> due_ms, of scheduled and leased jobs
--   ready:N:QUEUE:BUCKET   sorted set of ready jobs by rank (order key and id: `order.rank`); N is the length of QUEUE,
--                   BUCKET "=" and the shape for jobs of priority 0, "!" and the shape for others
--   heads:QUEUE     sorted set of the first job of each bucket: rank, zero byte and BUCKET
--   age:QUEUE       sorted set: id -> enqueued_ms, of ready jobs whose priority is not 0
--   waiting:ID      sorted set of the blocked jobs that wait for a job, by their bytes
--   done:STATE      sorted set: id -> finished_ms, per finished state
--   counts, bytes   hash: STATE:QUEUE -> number of jobs; bytes of payloads and results, of finished jobs
--   leases          hash: worker -> number of its leases
--   workers         hash: worker -> msgpack(registered_ms, queues, text);  heartbeats: sorted set worker -> ms
--   assigned:WORKER set of the gangs with members that are to be sent to a worker
--   offers          hash: worker -> msgpack(offered_ms, lease_ms, slots, free vector, ends_ms or false)
--   deferrals       sorted set: id -> when a claim has left the job to a better worker
--   readers:QUEUE   set of the workers of a queue
--   wake:WORKER     sorted set with one member while the worker has something to look at
--   schedules       hash: name -> text;  fires: sorted set name -> next_ms
--   finished:ID     channel: the end of a job that somebody waits for

local records = {}

local STATES = { 'scheduled', 'blocked', 'ready', 'leased', 'succeeded', 'failed', 'cancelled', 'dead' }
local CODES = {}
for code = 1, #STATES do CODES[STATES[code]] = code end
local FINISHED = { succeeded = true, failed = true, cancelled = true, dead = true }
local REQUEUEABLE = { failed = true, cancelled = true, dead = true }
local RARE_FIELDS = {
  'progress', 'message', 'error', 'unmet', 'shape', 'has_dependants', 'is_watched', 'preempted_for', 'gang',
}

local VERSION = CONSTANTS.version .. ''
local NONE = {}
local STEP_TABLES = {
  'records', 'dirty', 'created', 'due', 'buckets', 'done', 'counts', 'bytes', 'leases', 'woken_queues',
  'woken_workers', 'finished', 'preemptors',
}

local step  -- of the call that runs now; tables that the one before has not used are used again, and so is all of an unused step
local ARGUMENTS_PER_CALL = 4000  -- `unpack` has a limit

-- Call a command with a key and any number of arguments.
local function call_with(command, key, arguments)
  local count = #arguments
  if count == 0 then return end
  for first = 1, count, ARGUMENTS_PER_CALL do
    redis.call(command, key, unpack(arguments, first, math.min(first + ARGUMENTS_PER_CALL - 1, count)))
  end
end

-- Begin a step; an error reply if the store has a newer version.
function records.begin(prefix, clock_ms, writes)
  local meta = redis.call('HMGET', prefix .. 'meta', 'version', 'queues', 'fire', 'reserved')
  local version = meta[1]
  if version and version ~= VERSION and tonumber(version) > CONSTANTS.version then
    return redis.error_reply('DOVETAILVERSION ' .. version)
  end
  if writes and not version then redis.call('HSET', prefix .. 'meta', 'version', VERSION) end
  local now_ms = clock_ms ~= '' and tonumber(clock_ms)
  if not now_ms then
    local time = redis.call('TIME')
    now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  local before = step
  step = before and before.is_unused and before or {}
  step.prefix, step.now_ms, step.fire_ms, step.wakes_all = prefix, now_ms, meta[3] and tonumber(meta[3]), false
  step.queues = meta[2] and cmsgpack.unpack(meta[2]) or NONE
  step.reserved = meta[4] and cmsgpack.unpack(meta[4]) or NONE
  if step.is_unused then
    step.is_unused = false
    return nil
  end
  for position = 1, #STEP_TABLES do
    local name = STEP_TABLES[position]
    local used = before and before[name]
    step[name] = used and next(used) == nil and used or {}
  end
  return nil
end

function records.key(id) return step.prefix .. 'job:' .. id end

-- --- encoding

local function encode(record)
  local rare
  if record.has_rare then
    for _, name in ipairs(RARE_FIELDS) do
      local value = record[name]
      if value then
        rare = rare or {}
        rare[name] = value
      end
    end
  end
  local submitted = record.submitted_ms
  return cmsgpack.pack(
    CODES[record.state], record.queue, submitted, record.enqueued_ms - submitted,
    record.token, record.attempt, record.counted_after, record.size, record.worker,
    record.started_ms and record.started_ms - submitted, record.finished_ms and record.finished_ms - submitted,
    record.cancel_requested, record.encoding, rare, record.timeout_ms)
end

-- A new job that is ready, with no other fields than these.
function records.encode_ready(queue, size, timeout_ms)
  return cmsgpack.pack(CODES.ready, queue, step.now_ms, 0, 0, 0, 0, size, nil, nil, nil, nil, nil, nil, timeout_ms)
end

-- The fields `was_...` are what the indexes say of the job.
local function decode(id, text)
  local code, queue, submitted, waited, token, attempt, counted_after, size, worker, started, finished, cancel, encoding,
    rare, timeout_ms = cmsgpack.unpack(text)
  local state = STATES[code]
  local record = {
    id = id, state = state, was_state = state, queue = queue, submitted_ms = submitted,
    enqueued_ms = submitted + waited, token = token, attempt = attempt, counted_after = counted_after, size = size,
    worker = worker, was_worker = worker, started_ms = started and submitted + started,
    finished_ms = finished and submitted + finished, cancel_requested = cancel, encoding = encoding,
    timeout_ms = timeout_ms,
  }
  if rare then
    for name, value in pairs(rare) do record[name] = value end
    record.has_rare, record.was_unmet = true, rare.unmet
  end
  return record
end

-- Set a field that most records do not have.
function records.set(record, name, value)
  record[name] = value
  if value then record.has_rare = true end
end

-- --- reading

-- A record; false if the store does not have the job.
function records.get(id)
  local found = step.records[id]
  if found == nil then
    local text = redis.call('HGET', records.key(id), 'm')
    found = text and decode(id, text)
    step.records[id] = found
  end
  return found
end

-- The same for a completion, which needs the ended attempts.
function records.get_with_attempts(id)
  local found = step.records[id]
  if found == nil then
    local values = redis.call('HMGET', records.key(id), 'm', 'a')
    found = values[1] and decode(id, values[1])
    if found then found.attempts = values[2] and cmsgpack.unpack(values[2]) or {} end
    step.records[id] = found
  elseif found then
    records.attempts(found)
  end
  return found
end

-- Lease a ready job without rare fields as `machine.claim` does, but without a record, which costs as much as all else.
-- `text`: that of its record. Answer its token, attempt, timeout and queue; nil if it has a rare field.
function records.write_claimed(id, text, worker)
  local _, queue, submitted, waited, token, attempt, counted_after, size, _, _, _, cancel, encoding, rare,
    timeout_ms = cmsgpack.unpack(text)
  if rare then return nil end
  redis.call('HSET', records.key(id), 'm', cmsgpack.pack(
    CODES.leased, queue, submitted, waited, token + 1, attempt + 1, counted_after, size, worker,
    step.now_ms - submitted, nil, cancel, encoding, nil, timeout_ms))
  return token + 1, attempt + 1, timeout_ms, queue
end

-- Lease a ready job. Answer its queue, token, attempt, specification, payload and timeout; nil if the step has changed the
-- job, or it has a rare field.
function records.claim_plain(id, worker)
  if step.records[id] ~= nil then return nil end
  local values = redis.call('HMGET', records.key(id), 'm', 's', 'p')
  if not values[1] then return nil end
  local token, attempt, timeout_ms, queue = records.write_claimed(id, values[1], worker)
  return queue, token, attempt, values[2], values[3] or '', timeout_ms
end

-- Text of the specification and payload of a job.
function records.texts(id)
  local values = redis.call('HMGET', records.key(id), 's', 'p')
  return values[1], values[2] or ''
end

-- Ended attempts, oldest first: {number, token, worker, started_ms, ended_ms, outcome, and, if given,
-- error, traceback, exit_code, cpu_ms, peak_memory_bytes}.
function records.attempts(record)
  if not record.attempts then
    local text = redis.call('HGET', records.key(record.id), 'a')
    record.attempts = text and cmsgpack.unpack(text) or {}
  end
  return record.attempts
end

-- What the store interprets of a specification.
function records.read_spec(text)
  local data = cjson.decode(text)
  return {
    function_name = data['function'], schedule = data.schedule,
    queue = data.queue or CONSTANTS.default_queue, priority = data.priority or 0, shape = data.shape or '{}',
    retries = data.retries or CONSTANTS.retries, preemptible = data.preemptible, key = data.key, after = data.after or {},
    blocks = data.if_dependency_fails == 'block', at_ms = data.at_ms or 0, delay_ms = data.delay_ms or 0,
    timeout_ms = data.timeout_ms,
  }
end

function records.spec(record)
  if not record.spec then record.spec = records.read_spec(redis.call('HGET', records.key(record.id), 's')) end
  return record.spec
end

-- A new record of a job that is not in any index yet.
function records.create(id, text, payload, spec)
  local record = {
    id = id, state = 'blocked', queue = spec.queue, spec = spec, submitted_ms = step.now_ms, enqueued_ms = step.now_ms,
    token = 0, attempt = 0, counted_after = 0, size = #payload, attempts = {},
    timeout_ms = spec.timeout_ms,
  }
  step.created[id] = { text, payload }
  return record
end

function records.copy(record)
  local copied = {}
  for name, value in pairs(record) do copied[name] = value end
  return copied
end

function records.change(record)
  step.records[record.id] = record
  step.dirty[record.id] = record
end

-- --- writing

local function write_record(record, created)
  local key, text = records.key(record.id), encode(record)
  local attempts = record.has_new_attempts and cmsgpack.pack(record.attempts)
  if created then
    if created[2] == '' then
      redis.call('HSET', key, 's', created[1], 'm', text)
    else
      redis.call('HSET', key, 's', created[1], 'm', text, 'p', created[2])
    end
  elseif record.result then
    redis.call('HSET', key, 'm', text, 'a', attempts, 'r', record.result)
  elseif attempts then
    redis.call('HSET', key, 'm', text, 'a', attempts)
  else
    redis.call('HSET', key, 'm', text)
  end
end

local function add_counts(key, changes)
  for field, change in pairs(changes) do
    if change ~= 0 and redis.call('HINCRBY', key, field, order.number_text(change)) == 0 then redis.call('HDEL', key, field) end
  end
end

-- Apply members (id -> score, or false to remove) to a sorted set.
local function change_set(key, changes)
  local added, removed = {}, {}
  for id, score in pairs(changes) do
    if score then
      added[#added + 1] = score
      added[#added + 1] = id
    else
      removed[#removed + 1] = id
    end
  end
  call_with('ZREM', key, removed)
  call_with('ZADD', key, added)
end

function records.write_due()
  change_set(step.prefix .. 'due', step.due)
  step.due = {}
end

-- Write everything but buckets, which `buckets.write` writes.
function records.write()
  local prefix = step.prefix
  local ids = {}
  for id in pairs(step.created) do
    ids[#ids + 1] = '0'
    ids[#ids + 1] = id
  end
  call_with('ZADD', prefix .. 'ids', ids)
  for id, record in pairs(step.dirty) do write_record(record, step.created[id]) end
  records.write_due()
  for state, changes in pairs(step.done) do change_set(prefix .. 'done:' .. state, changes) end
  add_counts(prefix .. 'counts', step.counts)
  add_counts(prefix .. 'bytes', step.bytes)
  add_counts(prefix .. 'leases', step.leases)
end
