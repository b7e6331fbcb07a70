-- Requests of wrk: a prefix that 32 groups of requests share, then a suffix that no other request has.
-- Environment: PREFIX, SUFFIX (tokens, or words of a text; SUFFIX a multiple of 16), MAX_TOKENS, STREAM, MODEL, SEED,
-- KIND: ids and text are completions, of a chat the prefix is the system's message and the suffix the user's.
local GROUPS, CHUNKS, CHUNK_TOKENS = 32, 4096, 16
local prefix_tokens, suffix_tokens = tonumber(os.getenv("PREFIX")), tonumber(os.getenv("SUFFIX"))
local kind = os.getenv("KIND")
local separator = kind == "ids" and "," or " "
local path = kind == "chat" and "/v1/chat/completions" or "/v1/completions"
local before = '{"model":"' .. os.getenv("MODEL") .. '",'
local between, after = separator, ""
if kind == "chat" then
  before = before .. '"messages":[{"role":"system","content":"'
  between, after = '"},{"role":"user","content":"', '"}]'
elseif kind == "text" then before, after = before .. '"prompt":"', '"'
else before, after = before .. '"prompt":[', "]" end
after = after .. ',"max_tokens":' .. os.getenv("MAX_TOKENS") .. ',"stream":' .. os.getenv("STREAM")
  .. ',"temperature":0,"ignore_eos":true}'
local headers = { ["Content-Type"] = "application/json" }
local prefixes, chunks = {}, {}

local function word()
  local digits = tostring(math.random(100, 999))
  return "w" .. digits:gsub("%d", function(digit) return string.char(97 + digit) end)
end

local function tokens(count)
  local ids = {}
  for i = 1, count do ids[i] = kind == "ids" and math.random(300, 31000) or word() end
  return table.concat(ids, separator)
end

function init()
  math.randomseed(4242) -- prefixes are the same in every run
  if prefix_tokens > 0 then for i = 1, GROUPS do prefixes[i] = tokens(prefix_tokens) end end
  math.randomseed(tonumber(os.getenv("SEED")))
  for i = 1, CHUNKS do chunks[i] = tokens(CHUNK_TOKENS) end
end

function request()
  local parts = {}
  for i = 1, suffix_tokens / CHUNK_TOKENS do parts[i] = chunks[math.random(CHUNKS)] end
  local prompt = table.concat(parts, separator)
  if prefix_tokens > 0 or kind == "chat" then prompt = (prefixes[math.random(GROUPS)] or "") .. between .. prompt end
  return wrk.format("POST", path, headers, before .. prompt .. after)
end

function done(summary, latency)
  local failed = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"seconds":%.4f,"bytes":%d,"refused":%d,"broken":%d,"late":%d,"p50_us":%d,"p99_us":%d}\n',
    summary.requests, summary.duration / 1e6, summary.bytes, failed.status, failed.connect + failed.read + failed.write,
    failed.timeout, latency:percentile(50), latency:percentile(99)))
end
