//! Cost terms of routing mode `forecast`. Its policy in the Scheduler has the formula and the reason for each parameter,
//! and the same computation in Python.

/// Parameters of the time model and of the cost.
pub struct Model {
    /// Time of a step's prefill in ms by its new tokens n: n2 n^2 + n1 n + n0.
    pub prefill: [f64; 3],
    /// Time of a step's decoding in ms by the share p of KV blocks in use: p2 p^2 + p1 p + p0.
    pub decode: [f64; 3],
    /// Tokens per step of a rank that does not report them.
    pub default_budget: i64,
    pub base: f64,
    pub crowd: f64,
    pub shortage_ms: f64,
    pub room: f64,
    pub max_recomputations: f64,
    pub output_tokens: f64,
    pub fit_tokens: i64,
}

/// The request to place.
pub struct Request {
    pub prompt_tokens: i64,
    pub block_size: i64,
    pub calibration: f64,
    /// Seconds.
    pub now: f64,
}

impl Request {
    /// Blocks of the prompt, the last of which may be partial.
    fn blocks(&self) -> i64 {
        (self.prompt_tokens + self.block_size - 1) / self.block_size
    }
}

/// One candidate, as in `SchedulingContext`.
pub struct Candidate {
    pub leading_active_blocks: i64,
    pub active_blocks: i64,
    pub queued_blocks: i64,
    pub active_requests: i64,
    pub total_blocks: i64,
    pub max_batched_tokens: i64,
    pub prefill_tokens: i64,
    pub prefill_requests: i64,
    pub head_tokens: i64,
    pub head_since: f64,
    pub relative_latency: f64,
    pub reuse_chance: f64,
}

/// All candidates together.
pub struct Fleet {
    /// Mean share of the KV blocks in use, over the candidates whose KV blocks are known; 0 without any.
    pub share: f64,
    /// Candidates that compute a prompt over those that compute none, infinite without any of these; `None` if the KV
    /// blocks of one are known.
    pub busy_to_idle: Option<f64>,
}

impl Fleet {
    /// Returns the fleet with the share of KV blocks in use, the total blocks and the requests without a first token of
    /// each candidate.
    pub fn of(shares: &[f64], total_blocks: impl Iterator<Item = i64>, waiting: impl Iterator<Item = i64>) -> Self {
        let idle = waiting.filter(|requests| *requests == 0).count();
        let busy_to_idle = || (shares.len() - idle) as f64 / idle as f64;
        // The share of a candidate with unknown KV blocks is 0.
        let known = total_blocks.filter(|blocks| *blocks > 0).count();
        Self { share: shares.iter().sum::<f64>() / known.max(1) as f64, busy_to_idle: (known == 0).then(busy_to_idle) }
    }
}

/// Cost terms of a candidate, in ms unless stated otherwise.
pub struct Terms {
    pub forecast: f64,
    pub batch: f64,
    pub work: f64,
    pub output: f64,
    pub shortage: f64,
    pub eviction: f64,
    /// Not above 0.
    pub copies: f64,
    /// At the component's speed.
    pub own: f64,
    /// Factor for the rank's speed in the forecast.
    pub relative: f64,
    /// Tokens.
    pub new_tokens: i64,
    /// Whether the first token may be used for latency calibration.
    pub fit: bool,
}

impl Terms {
    /// Cost of the candidate, ms.
    pub fn cost(&self) -> f64 {
        self.forecast + self.batch + self.work + self.output + self.shortage + self.eviction + self.copies
    }
}

impl Model {
    /// Share of the KV blocks in use without the request, at most 1; 0 if their number is unknown.
    pub fn share(&self, request: &Request, candidate: &Candidate) -> f64 {
        let in_use = (candidate.active_blocks - request.blocks() + candidate.leading_active_blocks).max(0);
        over(in_use, candidate.total_blocks).min(1.0)
    }

    /// Cost terms of a candidate with its share and its blocks of the prompt, given the fleet.
    pub fn terms(
        &self,
        request: &Request,
        candidate: &Candidate,
        share: f64,
        blocks: PromptBlocks,
        fleet: &Fleet,
    ) -> Terms {
        let scarcity = fleet.share.powi(4);
        let calibration = request.calibration;
        // Most ranks have the speed of the component, and a power takes as long as all other terms.
        let relative = match candidate.relative_latency {
            1.0 => 1.0,
            latency => latency.powf(1.0 - scarcity),
        };
        let latency = calibration * relative;
        let &Candidate { head_tokens: head, prefill_tokens, prefill_requests, .. } = candidate;
        let new_tokens = request.prompt_tokens - blocks.held * request.block_size;
        let budget = match candidate.max_batched_tokens {
            0 => self.default_budget,
            budget => budget,
        };
        let decode = if candidate.active_requests > 0 { quadratic(self.decode, share) } else { 0.0 };
        let spent = (request.now - candidate.head_since).max(0.0) * 1e3;
        // A new prompt can join only the next step.
        let under_way = head > 0 && spent > decode / 2.0;
        let (waiting, ahead) =
            if under_way { (prefill_requests - 1, prefill_tokens - head) } else { (prefill_requests, prefill_tokens) };
        let (_, filled) = divided(ahead, budget);
        let time = |tokens: i64| self.prefill_ms(tokens, budget, decode);
        let own = calibration * time(new_tokens);
        let rest = if under_way { (latency * time(head) - spent).max(0.0) } else { latency * decode / 2.0 - spent };
        let batch = if waiting > 0 {
            let together = if ahead < budget { waiting } else { 1 };
            latency * (time((filled + new_tokens).min(budget)) - time(filled)) * together as f64
        } else {
            0.0
        };
        let lacking = over(candidate.active_blocks + candidate.queued_blocks, candidate.total_blocks) - self.room;
        let later = fleet.busy_to_idle.map_or(self.base * scarcity, |ratio| ratio.min(self.base));
        let price = later + self.crowd * candidate.active_requests as f64;
        let added = (request.blocks() - blocks.held) * request.block_size;
        let [_, token_ms, _] = self.prefill;
        Terms {
            forecast: rest + latency * time(ahead.saturating_add(new_tokens)),
            batch,
            work: price * own,
            output: self.output_tokens * (latency - calibration) * quadratic(self.decode, share),
            shortage: self.shortage_ms * lacking.max(0.0),
            eviction: added as f64 * (calibration * token_ms) * self.recomputations(candidate.reuse_chance),
            copies: (scarcity - 1.0) * blocks.copied * request.block_size as f64 * (calibration * token_ms),
            own,
            relative,
            new_tokens,
            fit: head == 0 && new_tokens >= self.fit_tokens,
        }
    }

    /// Number of recomputations that one eviction causes, given the chance that a block is used again.
    fn recomputations(&self, chance: f64) -> f64 {
        let chance = chance.min(self.max_recomputations / (1.0 + self.max_recomputations));
        chance / (1.0 - chance)
    }

    /// Time in ms of the steps for prompt tokens, each with `decode` ms of decoding.
    fn prefill_ms(&self, tokens: i64, budget: i64, decode: f64) -> f64 {
        let [n2, n1, n0] = self.prefill;
        let step = |tokens: i64| n0 + decode + (n2 * tokens as f64 + n1) * tokens as f64;
        let (full, rest) = divided(tokens, budget);
        full as f64 * step(budget) + if rest > 0 { step(rest) } else { 0.0 }
    }
}

/// Blocks of the prompt at one candidate.
#[derive(Clone, Copy)]
pub struct PromptBlocks {
    /// Leading blocks that it need not compute.
    held: i64,
    /// Blocks that it lacks and k others hold, each counted as (k - 1) / k.
    copied: f64,
}

/// Returns the blocks of the prompt at each candidate, given its overlap and its leading active blocks.
pub fn prompt_blocks(request: &Request, leading: impl ExactSizeIterator<Item = (i64, i64)>) -> Vec<PromptBlocks> {
    let reusable = (request.prompt_tokens - 1) / request.block_size;
    let held = leading.map(|(overlap, active)| overlap.max(active).clamp(0, reusable));
    let mut blocks: Vec<PromptBlocks> = held.map(|held| PromptBlocks { held, copied: 0.0 }).collect();
    let mut depths: Vec<i64> = blocks.iter().map(|each| each.held).filter(|held| *held > 0).collect();
    depths.sort_unstable();
    let (mut end, mut copied, mut left) = (0, 0.0, depths.len() as f64);
    let mut up_to = vec![(0, 0.0)];
    for equal in depths.chunk_by(|one, next| one == next) {
        let depth = equal.first().copied().unwrap_or(end);
        copied += (depth - end) as f64 * (left - 1.0) / left;
        up_to.push((depth, copied));
        end = depth;
        left -= equal.len() as f64;
    }
    for each in &mut blocks {
        let place = up_to.partition_point(|(depth, _)| *depth < each.held);
        each.copied = copied - up_to.get(place).map_or(copied, |(_, copied)| *copied);
    }
    blocks
}

/// Returns the number of candidates with a free slot, and the places of the lowest cost among these, or among all if
/// there are none.
pub fn cheapest(costs: &[f64], is_open: impl Fn(usize) -> bool) -> (usize, Vec<usize>) {
    let open = (0..costs.len()).filter(|place| is_open(*place)).count();
    let allowed = || costs.iter().enumerate().filter(|(place, _)| open == 0 || is_open(*place));
    let lowest = allowed().map(|(_, cost)| *cost).min_by(f64::total_cmp).unwrap_or_default();
    let places = allowed().filter(|(_, cost)| cost.total_cmp(&lowest).is_eq()).map(|(place, _)| place);
    (open, places.collect())
}

/// Quotient and remainder. A division takes as long as the rest of a term, and few ranks have more tokens than a step.
fn divided(tokens: i64, budget: i64) -> (i64, i64) {
    if (0..budget).contains(&tokens) { (0, tokens) } else { (tokens.div_euclid(budget), tokens.rem_euclid(budget)) }
}

fn quadratic([p2, p1, p0]: [f64; 3], x: f64) -> f64 {
    (p2 * x + p1) * x + p0
}

fn over(blocks: i64, total: i64) -> f64 {
    if total == 0 { 0.0 } else { blocks as f64 / total as f64 }
}
