-- The moves of a job, as `state_machine.py` has them, and what follows for the indexes and for other jobs.

local machine = {}

-- --- indexes

local function change(counts, field, amount)
  counts[field] = (counts[field] or 0) + amount
end

local function waiting_key(id) return step.prefix .. 'waiting:' .. id end

local function contains(list, wanted)
  for _, value in ipairs(list) do
    if value == wanted then return true end
  end
  return false
end

-- Change the sets of blocked jobs from one list of unmet jobs to another.
local function move_dependant(record, before, after)
  for _, other in ipairs(before) do
    if not contains(after, other) then redis.call('ZREM', waiting_key(other), record.id) end
  end
  for _, other in ipairs(after) do
    if not contains(before, other) then
      redis.call('ZADD', waiting_key(other), 0, record.id)
      local awaited = records.get(other)
      if awaited and not awaited.has_dependants then
        records.set(awaited, 'has_dependants', true)
        records.change(awaited)
      end
    end
  end
end

local function set_done(state, id, finished_ms)
  local changes = step.done[state]
  if not changes then
    changes = {}
    step.done[state] = changes
  end
  changes[id] = finished_ms
end

local function leave(record)
  local state = record.was_state
  change(step.counts, state .. ':' .. record.queue, -1)
  if state == 'ready' then
    buckets.remove(record)
  elseif state == 'scheduled' then
    step.due[record.id] = false
  elseif state == 'leased' then
    step.due[record.id] = false
    change(step.leases, record.was_worker, -1)
    local settings = step.queues[record.queue]
    if settings and settings[3] then step.woken_queues[record.queue] = true end  -- place for another job
  elseif FINISHED[state] then
    set_done(state, record.id, false)
    change(step.bytes, state .. ':' .. record.queue, -record.size)
  end
end

local function enter(record)
  local state = record.state
  change(step.counts, state .. ':' .. record.queue, 1)
  if state == 'ready' then
    buckets.add(record)
  elseif state == 'scheduled' then
    step.due[record.id] = order.number_text(record.due_ms)
  elseif state == 'leased' then
    step.due[record.id] = order.number_text(record.due_ms)
    change(step.leases, record.worker, 1)
  elseif FINISHED[state] then
    set_done(state, record.id, order.number_text(record.finished_ms))
    change(step.bytes, state .. ':' .. record.queue, record.size)
  end
end

local NOTHING = {}

-- Change a record and its place in the indexes.
local function index(record)
  local state, was = record.state, record.was_state
  if was ~= state then
    if was then leave(record) end
    enter(record)
    if was == 'blocked' or state == 'blocked' then
      local before = was == 'blocked' and record.was_unmet or NOTHING
      local after = state == 'blocked' and record.unmet or NOTHING
      move_dependant(record, before, after)
    end
  elseif state == 'blocked' then
    move_dependant(record, record.was_unmet or NOTHING, record.unmet or NOTHING)
  elseif state == 'leased' and record.due_ms then
    step.due[record.id] = order.number_text(record.due_ms)
  end
  record.was_state, record.was_worker, record.was_unmet = state, record.worker, record.unmet
  records.change(record)
end

-- --- moves; they change the record, and `machine.put` stores it

-- The attempt of a gang has ended: its workers are woken, and what they were not sent is forgotten.
local function drop_gang(record)
  if not record.gang then return end
  for _, member in ipairs(record.gang.members) do
    step.woken_workers[member[1]] = true
    if not member[3] then redis.call('SREM', step.prefix .. 'assigned:' .. member[1], record.id) end
  end
  record.gang = nil
end

local function finish(record, state, error)
  drop_gang(record)
  record.state, record.due_ms, record.worker, record.started_ms = state, nil, nil, nil
  record.cancel_requested, record.finished_ms, record.preempted_for = false, step.now_ms, nil
  records.set(record, 'error', error ~= '' and error or nil)
end

local function make_ready(record)
  drop_gang(record)
  record.state, record.due_ms, record.worker, record.started_ms = 'ready', nil, nil, nil
  record.preempted_for = nil
end

-- Ready, or scheduled if its time has not come.
local function start(record)
  local spec = records.spec(record)
  local due_ms = math.max(record.submitted_ms + spec.delay_ms, spec.at_ms)
  if due_ms > step.now_ms then
    record.state, record.due_ms, record.enqueued_ms = 'scheduled', due_ms, due_ms
  else
    record.state, record.enqueued_ms = 'ready', step.now_ms
  end
end

local function fail_dependency(record, id)
  if not records.spec(record).blocks then
    finish(record, 'cancelled', 'job ' .. id .. ', which it waits for, did not succeed')
  end
end

-- A new job. `unmet`: jobs that have not succeeded; `failed`: one of them that has ended.
function machine.submit(record, unmet, failed)
  records.set(record, 'unmet', unmet[1] and unmet or nil)
  if failed then
    fail_dependency(record, failed)
  elseif not record.unmet then
    start(record)
  end
end

function machine.claim(record, worker, lease_ms)
  record.state, record.due_ms = 'leased', step.now_ms + lease_ms
  record.token, record.attempt = record.token + 1, record.attempt + 1
  record.worker, record.started_ms = worker, step.now_ms
  record.progress, record.message = nil, nil
end

function machine.promote(record)
  record.state, record.due_ms = 'ready', nil
end

function machine.cancel(record, reason)
  if record.state == 'leased' then
    record.cancel_requested = true
    records.set(record, 'error', reason ~= '' and reason or nil)
  else
    finish(record, 'cancelled', reason)
  end
end

function machine.request_preemption(record, id)
  records.set(record, 'preempted_for', id)
end

-- Wake the workers that run a job.
function machine.wake_workers(record)
  if record.worker then step.woken_workers[record.worker] = true end
  for _, member in ipairs(record.gang and record.gang.members or {}) do step.woken_workers[member[1]] = true end
end

function machine.requeue(record, unmet)
  record.state = unmet[1] and 'blocked' or 'ready'
  records.set(record, 'unmet', unmet[1] and unmet or nil)
  record.shape, record.enqueued_ms, record.counted_after = nil, step.now_ms, record.attempt
  record.cancel_requested, record.error, record.finished_ms = false, nil, nil
  record.progress, record.message = nil, nil
end

-- End the running attempt. `completion`: outcome, and if given error, traceback, exit_code, cpu_ms,
-- peak_memory_bytes, result, encoding, final, jitter, shape.
local function end_attempt(record, completion)
  local attempts = records.attempts(record)
  local attempt = {
    record.attempt, record.token, record.worker, record.started_ms, step.now_ms, completion.outcome,
  }
  local details = {
    completion.error, completion.traceback, completion.exit_code, completion.cpu_ms, completion.peak_memory_bytes,
  }
  local given = 0
  for position = 1, 5 do
    if details[position] then given = position end
  end
  for position = 1, given do attempt[6 + position] = details[position] or false end
  if completion.outcome == 'preempted' then
    local count, oldest = 0, nil
    for position, ended in ipairs(attempts) do
      if ended[6] == 'preempted' then
        count = count + 1
        oldest = oldest or position
      end
    end
    if count >= CONSTANTS.preemptions_kept then table.remove(attempts, oldest) end
  end
  attempts[#attempts + 1] = attempt
  record.has_new_attempts = true
end

local function retry_or_finish(record, completion)
  local outcome, failures = completion.outcome, 0
  local retries = records.spec(record).retries
  local limit = completion.final and 0 or retries[outcome]
  for _, ended in ipairs(record.attempts) do
    if ended[6] == outcome and ended[1] > record.counted_after then failures = failures + 1 end
  end
  if failures > limit then
    finish(record, limit > 0 and 'dead' or 'failed', completion.error or outcome)
    return
  end
  if completion.shape then records.set(record, 'shape', completion.shape) end
  local delay_ms = order.backoff_ms(retries, failures, completion.jitter or 0)
  make_ready(record)
  if delay_ms > 0 then
    record.state, record.due_ms = 'scheduled', step.now_ms + delay_ms
  end
end

-- When the lease of a gang expires: the earliest deadline of its members that run; false: all have ended.
function machine.set_gang_deadline(record)
  local earliest
  for _, member in ipairs(record.gang.members) do
    if not member[4] and (not earliest or member[2] < earliest) then earliest = member[2] end
  end
  record.due_ms = earliest or record.due_ms
  return earliest ~= nil
end

-- The members of a worker have renewed the lease of their gang.
function machine.renew_gang(record, worker, deadline_ms)
  for _, member in ipairs(record.gang.members) do
    if member[1] == worker then member[2] = deadline_ms end
  end
  machine.set_gang_deadline(record)
end

function machine.has_member(record, worker, rank)
  if not record.gang then return rank == 0 end
  local member = record.gang.members[rank + 1]
  return member ~= nil and member[1] == worker
end

function machine.has_ended(record, rank)
  return record.gang ~= nil and record.gang.members[rank + 1][4]
end

-- The first rank whose worker has not renewed the lease until it expired.
function machine.expired_rank(record)
  local found, earliest = 0, math.huge
  for index, member in ipairs(record.gang and record.gang.members or {}) do
    if not member[4] and member[2] < earliest then found, earliest = index - 1, member[2] end
  end
  return found
end

local complete

-- One member of a gang has ended: the completion of the gang; nil: others still run.
local function complete_member(record, completion)
  local gang, rank, outcome = record.gang, completion.rank, completion.outcome
  local is_preempted = outcome == 'preempted' and record.preempted_for ~= nil
  if outcome ~= 'succeeded' and not is_preempted then
    if completion.error then
      completion.error = 'rank ' .. rank .. ' on ' .. gang.members[rank + 1][1] .. ': ' .. completion.error
    end
    return completion
  end
  gang.members[rank + 1][4] = true
  gang.preempted = gang.preempted or is_preempted
  if rank == 0 and not is_preempted then gang.result, gang.encoding = completion.result, completion.encoding end
  if machine.set_gang_deadline(record) then return nil end
  if gang.preempted then
    completion.outcome, completion.result, completion.error = 'preempted', nil, CONSTANTS.preempted
  else
    completion.result, completion.encoding = gang.result, gang.encoding
  end
  return completion
end

function machine.complete(record, completion)
  if record.gang then completion = complete_member(record, completion) end
  if completion then complete(record, completion) end
end

function complete(record, completion)
  local outcome = completion.outcome
  if outcome == 'released' then
    record.attempt = record.attempt - 1
    if record.cancel_requested then finish(record, 'cancelled', '') else make_ready(record) end
    return
  end
  end_attempt(record, completion)
  if outcome == 'succeeded' then
    finish(record, 'succeeded', '')
    record.result, record.encoding = completion.result, completion.encoding
    if record.result then record.size = record.size + #record.result end
  elseif record.cancel_requested or outcome == 'cancelled' then
    finish(record, 'cancelled', record.error or completion.error or '')
  elseif outcome == 'preempted' then
    make_ready(record)
  else
    retry_or_finish(record, completion)
  end
end

-- Whether a completion has been applied already: its worker sends it again because the answer was lost.
function machine.is_repeated(record, worker, token, outcome)
  local attempts = records.attempts(record)
  local last = attempts[#attempts]
  return last ~= nil and last[2] == token and last[6] == outcome and last[3] == worker
end

-- --- storing

-- The jobs that a finished one changes, as copies that are not stored yet.
local function changed_dependants(finished)
  local changed = {}
  if not finished.has_dependants then return changed end
  for _, id in ipairs(redis.call('ZRANGE', waiting_key(finished.id), 0, -1)) do
    local before = records.get(id)
    if before then
      local after = records.copy(before)
      if finished.state == 'succeeded' then
        local unmet = {}
        for _, other in ipairs(before.unmet) do
          if other ~= finished.id then unmet[#unmet + 1] = other end
        end
        after.unmet = unmet[1] and unmet or nil
        if not after.unmet then start(after) end
        changed[#changed + 1] = after
      else
        fail_dependency(after, finished.id)
        if after.state ~= before.state then changed[#changed + 1] = after end
      end
    end
  end
  return changed
end

-- Store a record, and then what follows for the jobs that wait for it, and for those that wait for these.
function machine.put(record)
  local changed = { record }
  while #changed > 0 do
    local item = table.remove(changed)
    local current = step.records[item.id]
    if current and current ~= item then  -- the job was changed after this copy was made
      item.was_state, item.was_worker, item.was_unmet = current.was_state, current.was_worker, current.was_unmet
    end
    index(item)
    if item.state == 'ready' or item.state == 'scheduled' then
      step.woken_queues[item.queue] = true
    elseif FINISHED[item.state] then
      if item.is_watched then
        item.is_watched = nil
        step.finished[#step.finished + 1] = item.id
      end
      for _, other in ipairs(changed_dependants(item)) do changed[#changed + 1] = other end
    end
  end
end

-- The same for a job that a claim has taken from its bucket; `claim.lua` changes the bucket and the counts.
function machine.put_claimed(record)
  record.was_state, record.was_worker = 'leased', record.worker
  records.change(record)
end

function machine.count_claimed(worker, queue, jobs)
  change(step.counts, 'ready:' .. queue, -jobs)
  change(step.counts, 'leased:' .. queue, jobs)
  change(step.leases, worker, jobs)
end
