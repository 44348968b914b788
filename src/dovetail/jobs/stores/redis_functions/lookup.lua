-- Reading jobs: whole records, lists, and what is finished.

local lookup = {}

local BUDGET = 1000  -- records that one call reads at most

local function due_of(record)
  if record.state ~= 'scheduled' and record.state ~= 'leased' then return false end
  return record.due_ms or tonumber(redis.call('ZSCORE', step.prefix .. 'due', record.id)) or false
end

local function attempts_of(record, with_contents)
  local attempts = records.attempts(record)
  if not with_contents then
    for _, attempt in ipairs(attempts) do
      if attempt[8] then attempt[8] = false end
    end
  end
  return attempts
end

local function gang_of(record)
  local gang = record.gang
  if not gang then return false end
  local members = {}
  for index, member in ipairs(gang.members) do
    members[index] = { member[1], member[2], member[3] and 1 or 0, member[4] and 1 or 0 }
  end
  return { members, gang.address, gang.result or false, gang.encoding, gang.preempted and 1 or 0 }
end

-- All of a record, as `redis_codec.record_from` reads it.
local function reply_of(record, with_contents)
  local values = redis.call('HMGET', records.key(record.id), 's', 'p', 'r')
  return {
    record.id, values[1], with_contents and values[2], record.state, record.shape or false,
    record.submitted_ms, record.enqueued_ms, due_of(record), record.token, record.attempt, record.counted_after,
    record.worker or false, record.started_ms or false, attempts_of(record, with_contents), record.unmet or {},
    record.cancel_requested and 1 or 0, record.progress and string.format('%.17g', record.progress) or false,
    record.message or '', with_contents and values[3], record.encoding or '', record.error or '',
    record.finished_ms or false, record.preempted_for or false,
    gang_of(record),
  }
end

function lookup.get(ids)
  local found = {}
  for position, id in ipairs(ids) do
    local record = records.get(id)
    found[position] = record and reply_of(record, true)
  end
  return found
end

-- Whether a filter accepts a record: states, queue, function, schedule, finished_before_ms; false accepts all.
function lookup.is_accepted(chosen, record)
  if chosen.states and not chosen.states[record.state] then return false end
  if chosen.queue and record.queue ~= chosen.queue then return false end
  if chosen.finished_before_ms and not (record.finished_ms and record.finished_ms < chosen.finished_before_ms) then
    return false
  end
  if not (chosen.function_name or chosen.schedule) then return true end
  local spec = records.spec(record)
  if chosen.function_name and spec.function_name ~= chosen.function_name then return false end
  return not chosen.schedule or spec.schedule == chosen.schedule
end

function lookup.filter(data)
  local chosen = {
    queue = data[2], function_name = data[3], schedule = data[4], finished_before_ms = data[5],
  }
  if #data[1] > 0 then
    chosen.states = {}
    for _, state in ipairs(data[1]) do chosen.states[state] = true end
  end
  return chosen
end

local INDEX_OF = {
  scheduled = 'due', leased = 'due', failed = 'done:failed', cancelled = 'done:cancelled', dead = 'done:dead',
  succeeded = 'done:succeeded',
}

-- Ids of jobs in some states, if there are few of them; nil if it is better to look through all jobs.
local function few_ids(states)
  if not states then return nil end
  local sets, count = {}, 0
  for state in pairs(states) do
    local name = INDEX_OF[state]
    if not name then return nil end
    if not sets[name] then
      sets[name] = true
      count = count + redis.call('ZCARD', step.prefix .. name)
    end
  end
  if count > BUDGET then return nil end
  local ids = {}
  for name in pairs(sets) do
    for _, id in ipairs(redis.call('ZRANGE', step.prefix .. name, 0, -1)) do ids[#ids + 1] = id end
  end
  table.sort(ids, function(a, b) return order.is_smaller(b, a) end)
  return ids
end

local function ids_before(before)
  local from = before and '(' .. before or '+'
  return redis.call('ZRANGE', step.prefix .. 'ids', from, '-', 'BYLEX', 'REV', 'LIMIT', 0, BUDGET)
end

-- Jobs that a filter accepts, by descending id, at most `limit`, and the id to continue before; false: no more.
function lookup.find(chosen, limit, before)
  local few = few_ids(chosen.states)
  local ids = few or ids_before(before)
  local found, last = {}, false
  for _, id in ipairs(ids) do
    if #found >= limit then return { found, last } end
    if not before or order.is_smaller(id, before) then
      local record = records.get(id)
      if record and lookup.is_accepted(chosen, record) then found[#found + 1] = reply_of(record, false) end
      last = id
    end
  end
  return { found, not few and #ids == BUDGET and last }
end

-- Which of these jobs are finished or unknown; the end of the others will be published.
function lookup.watch(ids, watches)
  local finished = {}
  for _, id in ipairs(ids) do
    local record = records.get(id)
    if not record or FINISHED[record.state] then
      finished[#finished + 1] = id
    elseif watches and not record.is_watched then
      records.set(record, 'is_watched', true)
      records.change(record)
    end
  end
  return finished
end
