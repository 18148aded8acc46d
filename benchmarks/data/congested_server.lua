-- What nginx runs for congestion.py: files behind a delay and one link, both of which are slower in bursts.
-- nginx has one worker process, so what stands here is known to all requests.

local root, latency_s, rate, times = ... -- folder; seconds a request; bytes a second; how much worse a burst is
local PIECE = 16384 -- bytes that the link carries at once: more than one image, so requests take turns
local this = {}
local bursts, origin = {}, 0 -- {begin, end} in seconds since origin
local free_at = 0 -- when the link has carried all that it was given
local flying, area, since = 0, 0, 0 -- requests under way, their integral over time, and until when it was taken
local served, waited, longest, bytes = 0, 0, 0, 0

local function now()
    ngx.update_time()
    return ngx.now()
end

local function slower(at)
    for _, burst in ipairs(bursts) do
        if at - origin >= burst[1] and at - origin < burst[2] then
            return times
        end
    end
    return 1
end

local function carry(count) -- returns when the link, first come first served, has carried so many bytes
    local at = now()
    free_at = math.max(free_at, at) + count * slower(at) / rate
    ngx.sleep(free_at - at)
    bytes = bytes + count
end

local function fly(change)
    local at = now()
    area, since = area + flying * (at - since), at
    flying = flying + change
    return at
end

function this.delay()
    ngx.ctx.begun = fly(1)
    ngx.sleep(latency_s * slower(ngx.ctx.begun))
end

function this.done()
    local took = fly(-1) - ngx.ctx.begun
    served, waited, longest = served + 1, waited + took, math.max(longest, took)
end

local function asked_for(size) -- first and last byte, and whether it is a part
    local first, last = (ngx.var.http_range or ""):match("^bytes=(%d*)-(%d*)$")
    if not first or first .. last == "" then
        return 0, size - 1, false
    elseif first == "" then
        return math.max(0, size - last), size - 1, true
    end
    return tonumber(first), math.min(tonumber(last) or size - 1, size - 1), true
end

function this.file()
    local file = io.open(root .. ngx.var.uri, "rb")
    if not file then
        return ngx.exit(404)
    end
    local size = file:seek("end")
    local first, last, part = asked_for(size)
    ngx.header["Accept-Ranges"] = "bytes"
    if first >= size then
        file:close()
        ngx.header["Content-Range"] = "bytes */" .. size
        return ngx.exit(416)
    end
    ngx.header["Content-Type"] = "application/octet-stream"
    ngx.header["Content-Length"] = last - first + 1
    if part then
        ngx.status = 206
        ngx.header["Content-Range"] = string.format("bytes %d-%d/%d", first, last, size)
    end
    if ngx.req.get_method() == "HEAD" then
        file:close()
        return ngx.send_headers()
    end
    file:seek("set", first)
    for at = first, last, PIECE do
        local count = math.min(PIECE, last - at + 1)
        carry(count)
        if not ngx.print(file:read(count)) or not ngx.flush(true) then
            break -- nobody listens any more
        end
    end
    file:close()
end

function this.restart() -- the body: a line "begin end" a burst
    ngx.req.read_body()
    bursts, origin, free_at = {}, now(), 0
    for begin, finish in (ngx.req.get_body_data() or ""):gmatch("(%S+) (%S+)") do
        table.insert(bursts, { tonumber(begin), tonumber(finish) })
    end
    this.stats()
end

local before = now()
function this.stats() -- since it was last asked for
    local at = fly(0)
    local mean, worst = "null", "null"
    if served > 0 then
        mean, worst = 1000 * waited / served, 1000 * longest
    end
    ngx.say(
        string.format(
            '{"latency_ms": %s, "longest_ms": %s, "served": %d, "fetches": %.3f, "bytes": %d, "congested": %s}',
            mean, worst, served, area / math.max(at - before, 0.001), bytes, tostring(slower(at) > 1)
        )
    )
    served, waited, longest, bytes, area, before = 0, 0, 0, 0, 0, at
end

return this
