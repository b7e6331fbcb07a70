-- Requests of wrk: a prefix that 32 groups of requests share, then a suffix that no other request has.
-- Environment: PREFIX, SUFFIX (tokens, or words of a text; SUFFIX a multiple of 16), MAX_TOKENS, STREAM, MODEL, SEED, TEXT.
local GROUPS, CHUNKS, CHUNK_TOKENS = 32, 4096, 16
local prefix_tokens, suffix_tokens = tonumber(os.getenv("PREFIX")), tonumber(os.getenv("SUFFIX"))
local is_text = os.getenv("TEXT") == "true"
local separator = is_text and " " or ","
local head = '{"model":"' .. os.getenv("MODEL") .. '","prompt":' .. (is_text and '"' or "[")
local tail = (is_text and '"' or "]") .. ',"max_tokens":' .. os.getenv("MAX_TOKENS") .. ',"stream":' .. os.getenv("STREAM")
  .. ',"temperature":0,"ignore_eos":true}'
local headers = { ["Content-Type"] = "application/json" }
local prefixes, chunks = {}, {}

local function tokens(count)
  local ids = {}
  for i = 1, count do ids[i] = is_text and "w" .. math.random(100, 999) or math.random(300, 31000) end
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
  if prefix_tokens > 0 then parts[1] = prefixes[math.random(GROUPS)] end
  for _ = 1, suffix_tokens / CHUNK_TOKENS do parts[#parts + 1] = chunks[math.random(CHUNKS)] end
  return wrk.format("POST", "/v1/completions", headers, head .. table.concat(parts, separator) .. tail)
end

function done(summary, latency)
  local failed = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"seconds":%.4f,"bytes":%d,"refused":%d,"broken":%d,"late":%d,"p50_us":%d,"p99_us":%d}\n',
    summary.requests, summary.duration / 1e6, summary.bytes, failed.status, failed.connect + failed.read + failed.write,
    failed.timeout, latency:percentile(50), latency:percentile(99)))
end
