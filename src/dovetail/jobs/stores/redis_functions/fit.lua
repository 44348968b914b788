-- Whether a shape fits into free resources, and the cards that it takes: the first of `Fit.assignments`.

local fit = {}

local WHOLE_CARD_MILLI = 1000
local shapes, shapes_cached = {}, 0

-- A shape by its text. Parsed shapes are kept over calls: a pure function of the text.
function fit.shape(text)
  local found = shapes[text]
  if found then return found end
  local data = cjson.decode(text)
  local shape = {
    text = text,
    is_plain = text == '{}',
    kind = data.kind or 'cpu only',
    cpu_milli = data.cpu_milli or 0,
    memory_bytes = data.memory_bytes or 0,
    cards = data.cards or 0,
    gpu_milli = data.gpu_milli or 0,
    gpu_memory_bytes = data.gpu_memory_bytes or 0,
    nvdecs = data.nvdecs or 0,
    nvencs = data.nvencs or 0,
    custom = data.custom or {},
    ranks = data.ranks or 1,  -- of a gang; all else is what one rank needs
    labels = {},
  }
  for name, values in pairs(data.labels or {}) do
    local accepted = {}
    for _, value in ipairs(values) do accepted[value] = true end
    shape.labels[name] = accepted
  end
  if data.accelerators and #data.accelerators > 0 then
    shape.accelerators = {}
    for _, key in ipairs(data.accelerators) do shape.accelerators[key] = true end
  end
  if shapes_cached >= CONSTANTS.shapes_cached then
    shapes, shapes_cached = {}, 0
  end
  shape.is_simple = shape.kind == 'cpu only' and not next(shape.custom) and not next(shape.labels)
  shapes[text] = shape
  shapes_cached = shapes_cached + 1
  return shape
end

local kinds, kinds_cached, states, states_cached = {}, 0, {}, 0

-- A node by the second line of a free vector.
local function kind_of(text)
  local found = kinds[text]
  if found then return found end
  local data = cjson.decode(text)
  local kind = { text = text, cpu_milli = data[1], memory_bytes = data[2], custom = data[3], labels = {}, cards = {} }
  for _, label in ipairs(data[4]) do kind.labels[label[1]] = label[2] end
  for index, card in ipairs(data[5]) do
    kind.cards[index] = { model = card[1], memory_bytes = card[2], nvdecs = card[3], nvencs = card[4] }
  end
  if kinds_cached >= CONSTANTS.shapes_cached then
    kinds, kinds_cached = {}, 0
  end
  kinds[text] = kind
  kinds_cached = kinds_cached + 1
  return kind
end

-- Free resources by their text (`free_vector.py`). Kept over calls, and never changed: see `fit.copy`.
function fit.free(text)
  local found = states[text]
  if found then return found end
  local newline = string.find(text, '\n', 1, true)
  local data, kind = cjson.decode(string.sub(text, 1, newline - 1)), kind_of(string.sub(text, newline + 1))
  local free = {
    text = text, kind = kind, cpu_milli = data[1], memory_bytes = data[2], custom = {}, labels = kind.labels, cards = {},
  }
  for index, pair in ipairs(kind.custom) do free.custom[pair[1]] = data[3][index] end
  for index, card in ipairs(data[4]) do
    local whole = kind.cards[index]
    free.cards[index] = {
      model = whole.model, whole = whole, milli = card[1], memory_bytes = card[2], nvdecs = card[3], nvencs = card[4],
    }
  end
  if states_cached >= CONSTANTS.free_vectors_cached then
    states, states_cached = {}, 0
  end
  states[text] = free
  states_cached = states_cached + 1
  return free
end

-- What is free on such a node without jobs.
function fit.empty(kind)
  if not kind.empty then
    local free = {
      kind = kind, cpu_milli = kind.cpu_milli, memory_bytes = kind.memory_bytes, custom = {}, labels = kind.labels,
      cards = {},
    }
    for _, pair in ipairs(kind.custom) do free.custom[pair[1]] = pair[2] end
    for index, whole in ipairs(kind.cards) do
      free.cards[index] = {
        model = whole.model, whole = whole, milli = WHOLE_CARD_MILLI, memory_bytes = whole.memory_bytes,
        nvdecs = whole.nvdecs, nvencs = whole.nvencs,
      }
    end
    kind.empty = free
  end
  return kind.empty
end

-- A copy from which can be taken.
function fit.copy(free)
  local copied = {
    kind = free.kind, cpu_milli = free.cpu_milli, memory_bytes = free.memory_bytes, custom = {}, labels = free.labels,
    cards = {},
  }
  for name, amount in pairs(free.custom) do copied.custom[name] = amount end
  for index, card in ipairs(free.cards) do
    copied.cards[index] = {
      model = card.model, whole = card.whole, milli = card.milli, memory_bytes = card.memory_bytes, nvdecs = card.nvdecs,
      nvencs = card.nvencs,
    }
  end
  return copied
end

-- Free resources as text.
function fit.text(free)
  local amounts, cards = {}, {}
  for index, pair in ipairs(free.kind.custom) do amounts[index] = string.format('%.0f', free.custom[pair[1]]) end
  for index, card in ipairs(free.cards) do
    cards[index] = string.format('[%.0f,%.0f,%.0f,%.0f]', card.milli, card.memory_bytes, card.nvdecs, card.nvencs)
  end
  return string.format('[%.0f,%.0f,[', free.cpu_milli, free.memory_bytes) .. table.concat(amounts, ',') .. '],['
    .. table.concat(cards, ',') .. ']]\n' .. free.kind.text
end

local function quotient(a, b)
  return (a - math.fmod(a, b)) / b
end

-- Share that a worker takes of a card; nil if the card is unsuitable.
local function card_share(shape, index, card)
  local whole = card.whole
  if shape.accelerators and not shape.accelerators[card.model] then return nil end
  if shape.gpu_memory_bytes > whole.memory_bytes then return nil end
  if shape.kind == 'whole-numbered gpu' then
    return { card = index, milli = WHOLE_CARD_MILLI, memory_bytes = whole.memory_bytes, nvdecs = 0, nvencs = 0 }
  elseif shape.kind == 'entire gpu' then
    return {
      card = index, milli = WHOLE_CARD_MILLI, memory_bytes = whole.memory_bytes,
      nvdecs = whole.nvdecs, nvencs = whole.nvencs,
    }
  end
  if shape.nvdecs > whole.nvdecs or shape.nvencs > whole.nvencs then return nil end
  if shape.kind == 'codec' then
    return { card = index, milli = 0, memory_bytes = 0, nvdecs = shape.nvdecs, nvencs = shape.nvencs }
  end
  local milli, memory_bytes = shape.gpu_milli, shape.gpu_memory_bytes
  if milli == 0 then milli = quotient(WHOLE_CARD_MILLI * memory_bytes, whole.memory_bytes) end
  if memory_bytes == 0 then memory_bytes = quotient(whole.memory_bytes * milli, WHOLE_CARD_MILLI) end
  return { card = index, milli = milli, memory_bytes = memory_bytes, nvdecs = shape.nvdecs, nvencs = shape.nvencs }
end

-- Whether this share of the card is free now.
local function card_accepts(shape, share, card)
  if shape.cards == 1 and (card.nvdecs < shape.nvdecs or card.nvencs < shape.nvencs) then return false end
  local whole = card.whole
  local is_whole = card.milli == WHOLE_CARD_MILLI and card.memory_bytes == whole.memory_bytes
  if shape.kind == 'whole-numbered gpu' then return is_whole end
  if shape.kind == 'entire gpu' then
    return is_whole and card.nvdecs == whole.nvdecs and card.nvencs == whole.nvencs
  end
  return card.milli >= share.milli and card.memory_bytes >= share.memory_bytes
end

local function requested_codecs(shape, card)
  return (shape.nvdecs > 0 and card.nvdecs or 0) + (shape.nvencs > 0 and card.nvencs or 0)
end

-- Whether the `count` cards with most of a codec have as many as needed.
local function has_enough(able, cards, codec, count, need)
  local amounts, sum = {}, 0
  for index, share in ipairs(able) do amounts[index] = cards[share.card][codec] end
  table.sort(amounts, function(a, b) return a > b end)
  for index = 1, count do sum = sum + amounts[index] end
  return sum >= need
end

-- As many cards as the shape needs that together have its codecs; cards with few codecs first.
local function cards_with_codecs(shape, able, cards)
  local count = shape.cards
  if #able < count then return nil end
  if count == 1 or (shape.nvdecs == 0 and shape.nvencs == 0) then
    local chosen = {}
    for index = 1, count do chosen[index] = able[index] end
    return chosen
  end
  local sorted = {}
  for _, share in ipairs(able) do  -- a stable insertion sort
    local codecs, place = requested_codecs(shape, cards[share.card]), #sorted + 1
    while place > 1 and codecs < sorted[place - 1].codecs do
      sorted[place] = sorted[place - 1]
      place = place - 1
    end
    sorted[place] = { codecs = codecs, share = share }
  end
  for codec, need in pairs({ nvdecs = shape.nvdecs, nvencs = shape.nvencs }) do
    if not has_enough(able, cards, codec, count, need) then return nil end
  end
  -- reached[n]: codecs, none counted beyond need, that some n of the cards so far have, and which cards
  local reached = {}
  for taken = 0, count do reached[taken] = { list = {}, sums = {} } end
  reached[0].list[1] = { nvdecs = 0, nvencs = 0, chosen = {} }
  local goal = shape.nvdecs .. ':' .. shape.nvencs
  for _, item in ipairs(sorted) do
    local card = cards[item.share.card]
    for taken = count - 1, 0, -1 do
      local following = reached[taken + 1]
      for _, state in ipairs(reached[taken].list) do
        local nvdecs = math.min(shape.nvdecs, state.nvdecs + card.nvdecs)
        local nvencs = math.min(shape.nvencs, state.nvencs + card.nvencs)
        local sum = nvdecs .. ':' .. nvencs
        if not following.sums[sum] then
          local chosen = { unpack(state.chosen) }
          chosen[#chosen + 1] = item.share
          following.sums[sum] = chosen
          following.list[#following.list + 1] = { nvdecs = nvdecs, nvencs = nvencs, chosen = chosen }
        end
      end
    end
    local found = reached[count].sums[goal]
    if found then
      table.sort(found, function(a, b) return a.card < b.card end)
      return found
    end
  end
  return nil
end

-- The codecs are taken from the first card on.
local function with_codecs(shape, chosen, cards)
  local nvdecs, nvencs = shape.nvdecs, shape.nvencs
  for _, share in ipairs(chosen) do
    local card = cards[share.card]
    share.nvdecs, share.nvencs = math.min(nvdecs, card.nvdecs), math.min(nvencs, card.nvencs)
    nvdecs, nvencs = nvdecs - share.nvdecs, nvencs - share.nvencs
  end
  return chosen
end

-- Shares of cards of the first assignment; nil if there is none.
local function first_assignment(shape, cards)
  if shape.kind == 'cpu only' then return {} end
  local able = {}
  for index, card in ipairs(cards) do
    local share = card_share(shape, index, card)
    if share and card_accepts(shape, share, card) then able[#able + 1] = share end
  end
  if shape.kind == 'whole-numbered gpu' then
    local chosen = cards_with_codecs(shape, able, cards)
    return chosen and with_codecs(shape, chosen, cards)
  elseif shape.kind == 'entire gpu' then
    return cards_with_codecs(shape, able, cards)
  end
  return able[1] and { able[1] }
end

local function has_host_resources(shape, free)
  if free.cpu_milli < shape.cpu_milli or free.memory_bytes < shape.memory_bytes then return false end
  for name, amount in pairs(shape.custom) do
    if amount < 0 or (free.custom[name] or 0) < amount then return false end
  end
  for name, accepted in pairs(shape.labels) do
    if not accepted[free.labels[name]] then return false end
  end
  return true
end

-- Shares of cards of the first assignment, if it is free; nil: it does not fit.
local function free_shares(shape, free)
  if not has_host_resources(shape, free) then return nil end
  local shares = first_assignment(shape, free.cards)
  if not shares then return nil end
  for _, share in ipairs(shares) do
    local card = free.cards[share.card]
    if card.nvdecs < share.nvdecs or card.nvencs < share.nvencs then return nil end
  end
  return shares
end

-- Whether a shape fits.
function fit.fits(shape, free)
  if shape.is_plain then return true end
  if shape.is_simple then return free.cpu_milli >= shape.cpu_milli and free.memory_bytes >= shape.memory_bytes end
  return free_shares(shape, free) ~= nil
end

-- Give back a seat: CPUs, memory, custom resources (name, amount) and shares of cards (index, milli, memory, codecs).
function fit.give_back(seat, free)
  free.cpu_milli, free.memory_bytes = free.cpu_milli + seat[1], free.memory_bytes + seat[2]
  for _, item in ipairs(seat[3]) do
    if free.custom[item[1]] then free.custom[item[1]] = free.custom[item[1]] + item[2] end
  end
  for _, share in ipairs(seat[4]) do
    local card = free.cards[share[1]]
    card.milli, card.memory_bytes = card.milli + share[2], card.memory_bytes + share[3]
    card.nvdecs, card.nvencs = card.nvdecs + share[4], card.nvencs + share[5]
  end
end

-- Take the first assignment from the free resources; false, and nothing is taken, if the shape does not fit.
function fit.take(shape, free)
  if shape.is_plain then return true end
  if shape.is_simple then
    if free.cpu_milli < shape.cpu_milli or free.memory_bytes < shape.memory_bytes then return false end
    free.cpu_milli, free.memory_bytes = free.cpu_milli - shape.cpu_milli, free.memory_bytes - shape.memory_bytes
    free.is_changed, free.idle_milli = true, nil
    return true
  end
  local shares = free_shares(shape, free)
  if not shares then return false end
  for _, share in ipairs(shares) do
    local card = free.cards[share.card]
    card.milli, card.memory_bytes = card.milli - share.milli, card.memory_bytes - share.memory_bytes
    card.nvdecs, card.nvencs = card.nvdecs - share.nvdecs, card.nvencs - share.nvencs
  end
  free.cpu_milli, free.memory_bytes = free.cpu_milli - shape.cpu_milli, free.memory_bytes - shape.memory_bytes
  for name, amount in pairs(shape.custom) do
    if amount > 0 then free.custom[name] = free.custom[name] - amount end
  end
  free.is_changed, free.idle_milli = true, nil
  return true
end
