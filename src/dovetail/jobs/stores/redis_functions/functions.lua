-- Registration of the steps. Arguments of each: the time of a clock for tests or "" for that of the server, and its own.
-- While a library is loaded there are no globals but `redis`.

local NO_FLAGS, READS, FREES = {}, { 'no-writes' }, { 'allow-oom' }

local function register(name, flags)
  local run, writes = steps[name], flags ~= READS
  redis.register_function({
    function_name = CONSTANTS.library .. '_' .. name,
    flags = flags,
    callback = function(keys, arguments)
      local refusal = records.begin(keys[1], arguments[1], writes)
      if refusal then return refusal end
      return run(arguments)
    end,
  })
end

local function register_all(names, flags)
  for position = 1, #names do register(names[position], flags) end
end

register_all({ 'get', 'find', 'id_of_key', 'finished', 'workers', 'stats', 'schedules', 'reservations', 'now' }, READS)
register_all({
  'submit', 'ingest', 'cancel', 'requeue', 'watch', 'register_worker', 'exchange', 'set_paused', 'set_limits', 'put_schedule',
  'fire',
}, NO_FLAGS)
-- also when the memory of the server is full, because they free some
register_all({ 'purge', 'remove_worker', 'remove_schedule' }, FREES)
