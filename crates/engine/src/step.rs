//! The engine's step: read this first. Plan who computes how many tokens, give them pages, run the program once for all
//! of them, sample, commit. Where the program chooses tokens itself, only those rows are sampled here that it left to us.

use std::collections::HashMap;

use ingle_graph::backend::PathCount;
use ingle_graph::sample::Chosen;
use ingle_graph::{CONTRACT_VERSION, Inputs, KvGroup, LOGITS_SPAN, PAGE};

use crate::batch::{self, Part};
use crate::kv::{Held, Kv, PrefixKey};
use crate::request::{Event, FinishReason, Request, RequestId, TokenEvent};
use crate::runner::Runner;
use crate::sampler::{Sample, Sampler};
use crate::scheduler::{self, Counts, Limits};
use crate::{Error, Result};

/// A request on its way: its tokens, its pages, its length. The one owner of every length.
struct Sequence {
    id: RequestId,
    request: Request,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in the pools.
    computed: usize,
    held: Held,
    sampler: Sampler,
}

impl Sequence {
    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }
}

/// Settings of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineOptions {
    /// Most tokens in one step.
    pub step_tokens: usize,
    /// Most tokens of one sequence in one step.
    pub chunk: usize,
    /// Most sequences in one step.
    pub sequences: usize,
    /// Whether finished prefixes are kept and shared.
    pub prefix_cache: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { step_tokens: 512, chunk: 512, sequences: 64, prefix_cache: true }
    }
}

/// Counts since the engine was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Steps run.
    pub steps: u64,
    /// Tokens computed.
    pub computed: u64,
    /// Tokens found in the prefix cache instead.
    pub cached: u64,
    /// Sequences that gave up their pages.
    pub preempted: u64,
    /// Most sequences in one step.
    pub widest: usize,
}

/// Sequences in flight over one loaded model.
pub struct Engine {
    runner: Runner,
    limits: Limits,
    kv: Kv,
    /// Pages of a page table, by KV group: the same in every step.
    rings: Vec<usize>,
    context: usize,
    root: PrefixKey,
    /// In order of arrival.
    sequences: Vec<Sequence>,
    inputs: Inputs,
    /// The step's peaks of logits, row by row.
    peaks: Vec<f32>,
    /// By wanted row of the step: what the program chose.
    chosen: Vec<Chosen>,
    /// Tokens that programs chose, and those they left to the host, by reason.
    choices: Vec<PathCount>,
    next_id: u64,
    stats: Stats,
}

impl Engine {
    /// An engine over a loaded model. Where a pool is too small for the window and a whole chunk, chunks are shorter.
    pub fn new(runner: Runner, model_key: u64, options: EngineOptions) -> Self {
        let root = PrefixKey::new((CONTRACT_VERSION, model_key, runner.options()));
        let plan = runner.kv();
        let kv = Kv::new(runner.model().graph.kv_groups.clone(), &plan.pages, options.prefix_cache);
        let pools: Vec<(KvGroup, usize)> = kv.groups().iter().copied().zip(kv.capacity()).collect();
        let (windows, whole): (Vec<_>, Vec<_>) = pools.iter().partition(|(group, _)| group.window.is_some());
        let fits = |chunk: &usize| {
            windows.iter().all(|(group, pages)| group.ring(*chunk, plan.context, PAGE) <= *pages)
        };
        let chunk = (1..=options.chunk.min(plan.context)).rev().find(fits).unwrap_or(1);
        let context = whole.iter().map(|(_, pages)| pages * PAGE).fold(plan.context, usize::min);
        Self {
            limits: Limits {
                tokens: options.step_tokens.max(1),
                chunk,
                sequences: options.sequences.max(1),
                page: PAGE,
                groups: kv.groups().to_vec(),
            },
            rings: pools.iter().map(|(group, _)| group.ring(chunk, plan.context, PAGE)).collect(),
            context,
            kv,
            root,
            sequences: Vec::new(),
            inputs: Inputs::default(),
            peaks: Vec::new(),
            chosen: Vec::new(),
            choices: Vec::new(),
            next_id: 0,
            stats: Stats::default(),
            runner,
        }
    }

    /// The loaded model.
    pub fn runner(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Counts since the engine was made.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Optional paths that ran, and those that did not and why: the device's, and who chose tokens, where a program may.
    pub fn paths(&mut self) -> Vec<PathCount> {
        let mut paths = self.runner.backend().paths();
        paths.extend(self.choices.iter().cloned());
        paths
    }

    /// Longest sequence in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether any request is unfinished.
    pub fn busy(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Pages somebody holds; none when nothing is in flight.
    pub fn pages_held(&self) -> usize {
        self.kv.held()
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`Error::Context`] with the numbers when the prompt leaves no room for a reply; [`Error::Pool`] when a window's pages
    /// do not fit its pool; an empty prompt; a token outside the vocabulary.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let (prompt, context) = (request.prompt.len(), self.context());
        let vocabulary = self.runner.model().config.vocabulary;
        if prompt == 0 {
            return Err(Error::EmptyPrompt);
        }
        if prompt >= context {
            return Err(Error::Context { prompt, context });
        }
        if let Some(&token) = request.prompt.iter().find(|&&t| t as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        let longest = prompt.saturating_add(request.max_tokens).min(context);
        for (group, capacity) in self.kv.capacity().into_iter().enumerate() {
            let needed = self.limits.peak(group, longest);
            if let Some(window) = self.kv.groups()[group].window
                && needed > capacity
            {
                return Err(Error::Pool { window, needed, capacity });
            }
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.sequences.push(Sequence {
            id,
            tokens: request.prompt.clone(),
            computed: 0,
            held: self.kv.nothing(self.root.salted(request.salt)),
            sampler: Sampler::new(request.sampling.clone(), request.choice, prompt),
            request,
        });
        Ok(id)
    }

    /// Ends a request; its pages are free at once.
    pub fn cancel(&mut self, id: RequestId) -> Option<Event> {
        let at = self.sequences.iter().position(|s| s.id == id)?;
        self.release(at);
        self.sequences.remove(at);
        Some(Event::Finished(id, FinishReason::Cancelled))
    }

    /// Lets go of all pages: the sequence is finished, or starts over.
    fn release(&mut self, at: usize) {
        let s = &mut self.sequences[at];
        self.kv.release(&mut s.held, self.root.salted(s.request.salt));
        s.computed = 0;
    }

    fn counts(&self) -> Vec<Counts> {
        self.sequences
            .iter()
            .map(|s| Counts { computed: s.computed, known: s.tokens.len(), priority: s.request.priority })
            .collect()
    }

    /// Plans a step and gives its sequences their pages: new ones those of the longest known prefix, all of them those
    /// they are going to write.
    fn plan(&mut self) -> Vec<(usize, usize)> {
        loop {
            let plan = scheduler::plan(&self.counts(), &self.kv.available(), &self.limits);
            for &at in &plan.preempt {
                self.release(at);
                self.stats.preempted += 1;
            }
            let mut found = 0;
            for &(at, _) in &plan.work {
                let s = &mut self.sequences[at];
                if s.computed == 0 {
                    s.computed = self.kv.adopt(&mut s.held, &s.tokens);
                    found += s.computed;
                }
            }
            self.stats.cached += found as u64;
            // What need not be computed leaves tokens of the step to others.
            if found > 0 && plan.preempt.is_empty() {
                continue;
            }
            let mut work: Vec<(usize, usize)> = Vec::with_capacity(plan.work.len());
            for (at, n) in plan.work {
                let s = &mut self.sequences[at];
                let n = n.min(s.tokens.len() - s.computed);
                if self.kv.grow(&mut s.held, s.computed + n) {
                    work.push((at, n));
                }
            }
            // Pages that two sequences share are not free when one of them gives way: then it takes another to.
            if !work.is_empty() || plan.preempt.is_empty() {
                return work;
            }
        }
    }

    /// Runs one step for as many sequences as fit.
    ///
    /// # Errors
    /// A device failure: no token was generated, and the step can be run again.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let work = self.plan();
        if work.is_empty() {
            return if self.busy() {
                Err(Error::Stuck { pages: self.kv.capacity() })
            } else {
                Ok(Vec::new())
            };
        }
        let part = |&(at, n): &(usize, usize)| {
            let s = &self.sequences[at];
            Part { tokens: &s.tokens, computed: s.computed, n, spans: &s.held.spans, all_rows: false }
        };
        let parts: Vec<Part<'_>> = work.iter().map(part).collect();
        let wanted = batch::fill(&mut self.inputs, &parts, &self.rings);
        self.ask(&work, &wanted);
        if let Err(error) = self.runner.run(&self.inputs) {
            for &(at, _) in &work {
                let s = &mut self.sequences[at];
                self.kv.settle(&mut s.held, s.computed);
            }
            return Err(error);
        }
        self.stats.steps += 1;
        self.stats.computed += self.inputs.tokens.len() as u64;
        self.stats.widest = self.stats.widest.max(work.len());
        self.commit(&work);
        let events = self.sample(&work, &wanted)?;
        self.finish(&events);
        Ok(events)
    }

    /// Computed tokens advance: pages that became full are remembered, and those that no later row sees are let go.
    fn commit(&mut self, work: &[(usize, usize)]) {
        for &(at, n) in work {
            let s = &mut self.sequences[at];
            s.computed += n;
            self.kv.commit(&mut s.held, &s.tokens, s.computed);
        }
    }

    /// Asks the program for the tokens that it can choose.
    fn ask(&mut self, work: &[(usize, usize)], wanted: &[usize]) {
        if !self.runner.options().sample {
            return;
        }
        let vocabulary = self.runner.model().config.vocabulary;
        for (&(at, _), _) in work.iter().zip(wanted).filter(|(_, w)| **w > 0) {
            let s = &self.sequences[at];
            let asked = s.sampler.on_device(&s.tokens, vocabulary, s.request.logprobs);
            if let Err(why) = asked {
                count(&mut self.choices, Some(why));
            }
            self.inputs.sampling.push(asked.ok());
        }
    }

    /// What the program chose; nothing where it chooses none.
    fn read_chosen(&mut self) -> Result<()> {
        self.chosen.clear();
        if !self.runner.options().sample {
            return Ok(());
        }
        for &number in self.runner.output("sampled")? {
            let chosen = Chosen::of(number).ok_or(Error::Sampled { number })?;
            match chosen {
                Chosen::Token(_) => count(&mut self.choices, None),
                Chosen::Unasked => {}
                Chosen::NaN => count(&mut self.choices, Some("NaN among the logits")),
                Chosen::Nothing => count(&mut self.choices, Some("no logit is above negative infinity")),
            }
            self.chosen.push(chosen);
        }
        Ok(())
    }

    /// One token for every sequence whose known tokens are all computed.
    fn sample(&mut self, work: &[(usize, usize)], wanted: &[usize]) -> Result<Vec<Event>> {
        let context = self.context();
        let vocabulary = self.runner.model().config.vocabulary;
        if wanted.iter().all(|&w| w == 0) {
            return Ok(Vec::new());
        }
        self.read_chosen()?;
        let is_token = |chosen: &Chosen| matches!(chosen, Chosen::Token(_));
        // Logits are only copied from the device for rows that are left to the host.
        let left = self.chosen.is_empty() || !self.chosen.iter().all(is_token);
        self.peaks.clear();
        if left {
            self.peaks.extend_from_slice(self.runner.output("peaks")?);
        }
        let logits = if left { self.runner.output("logits")? } else { &[] };
        let spans = vocabulary.div_ceil(LOGITS_SPAN);
        let mut events = Vec::new();
        let wanted = work.iter().zip(wanted).filter(|(_, w)| **w > 0);
        for (row, (&(at, _), _)) in wanted.enumerate() {
            let s = &mut self.sequences[at];
            let sample = match self.chosen.get(row) {
                Some(&Chosen::Token(id)) => Ok(Sample { id, logprob: None, top: Vec::new(), nan: 0 }),
                _ => {
                    let logits = &logits[row * vocabulary..(row + 1) * vocabulary];
                    let peaks = self.peaks.get(row * spans..(row + 1) * spans);
                    s.sampler.sample_peaked(logits, peaks, &s.tokens, s.request.logprobs)
                }
            };
            let sample = match sample {
                Ok(sample) => sample,
                Err(e) => {
                    events.push(Event::Failed(s.id, e.to_string()));
                    continue;
                }
            };
            s.tokens.push(sample.id);
            let Sample { id, logprob, top, nan } = sample;
            events.push(Event::Token(s.id, TokenEvent { id, logprob, top, nan }));
            if s.request.end_tokens.contains(&sample.id) {
                events.push(Event::Finished(s.id, FinishReason::Stop));
            } else if s.generated() >= s.request.max_tokens || s.tokens.len() >= context {
                events.push(Event::Finished(s.id, FinishReason::Length));
            }
        }
        Ok(events)
    }

    fn finish(&mut self, events: &[Event]) {
        for event in events {
            if let Event::Finished(id, _) | Event::Failed(id, _) = event
                && let Some(at) = self.sequences.iter().position(|s| s.id == *id)
            {
                self.release(at);
                self.sequences.remove(at);
            }
        }
    }

    /// Runs until every request is finished and returns each one's tokens: for tests and batch work.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn run_to_end(&mut self) -> Result<HashMap<RequestId, Vec<TokenEvent>>> {
        let mut replies: HashMap<RequestId, Vec<TokenEvent>> = HashMap::new();
        while self.busy() {
            for event in self.step()? {
                if let Event::Token(id, token) = event {
                    replies.entry(id).or_default().push(token);
                }
            }
        }
        Ok(replies)
    }
}

/// Counts a token that a program chose, or why it was left to the host.
fn count(choices: &mut Vec<PathCount>, declined: Option<&str>) {
    match choices.iter_mut().find(|path| path.declined.as_deref() == declined) {
        Some(path) => path.count += 1,
        None => {
            choices.push(PathCount { path: "token".into(), declined: declined.map(String::from), count: 1 })
        }
    }
}
