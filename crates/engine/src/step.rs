//! The engine's step: read this first. Plan who computes how many tokens, give them pages, run the program once for all
//! of them, sample, commit.

use std::collections::HashMap;

use ingle_graph::{CONTRACT_VERSION, Inputs, PAGE};

use crate::batch::{self, Part};
use crate::kv::{Pages, PrefixCache, PrefixKey};
use crate::request::{Event, FinishReason, Request, RequestId, TokenEvent};
use crate::runner::Runner;
use crate::sampler::Sampler;
use crate::scheduler::{self, Counts, Limits};
use crate::{Error, Result};

/// A request on its way: its tokens, its pages, its length. The one owner of every length.
struct Sequence {
    id: RequestId,
    request: Request,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in the pool.
    computed: usize,
    pages: Vec<u32>,
    /// Key of the prefix in the sequence's first `hashed` pages.
    key: PrefixKey,
    hashed: usize,
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
    options: EngineOptions,
    pages: Pages,
    prefixes: PrefixCache,
    root: PrefixKey,
    /// In order of arrival.
    sequences: Vec<Sequence>,
    inputs: Inputs,
    next_id: u64,
    stats: Stats,
}

impl Engine {
    /// An engine over a loaded model.
    pub fn new(runner: Runner, model_key: u64, options: EngineOptions) -> Self {
        let plan = runner.options();
        let root = PrefixKey::new((CONTRACT_VERSION, model_key, plan));
        Self {
            limits: Limits {
                tokens: options.step_tokens.max(1),
                chunk: options.chunk.max(1),
                sequences: options.sequences.max(1),
                page: PAGE,
            },
            options,
            pages: Pages::new(runner.kv().pages),
            prefixes: PrefixCache::new(),
            root,
            sequences: Vec::new(),
            inputs: Inputs::default(),
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

    /// Longest sequence in tokens.
    pub fn context(&self) -> usize {
        self.runner.kv().context.min(self.pages.capacity() * PAGE)
    }

    /// Whether any request is unfinished.
    pub fn busy(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Pages somebody holds; none when nothing is in flight.
    pub fn pages_held(&self) -> usize {
        self.pages.held()
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`Error::Context`] with the numbers when the prompt leaves no room for a reply; an empty prompt; a token outside
    /// the vocabulary.
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
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.sequences.push(Sequence {
            id,
            tokens: request.prompt.clone(),
            computed: 0,
            pages: Vec::new(),
            key: self.root.salted(request.salt),
            hashed: 0,
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
        // The last page first, so that the ends of prefixes are given up before their beginnings.
        for page in s.pages.drain(..).rev() {
            self.pages.release(page, self.prefixes.knows(page));
        }
        s.computed = 0;
        s.hashed = 0;
        s.key = self.root.salted(s.request.salt);
    }

    fn counts(&self) -> Vec<Counts> {
        self.sequences
            .iter()
            .map(|s| Counts {
                computed: s.computed,
                known: s.tokens.len(),
                pages: s.pages.len(),
                priority: s.request.priority,
            })
            .collect()
    }

    /// A sequence without pages takes those of the longest known prefix.
    fn adopt_prefix(&mut self, at: usize) {
        let s = &mut self.sequences[at];
        if !self.options.prefix_cache || !s.pages.is_empty() {
            return;
        }
        let root = self.root.salted(s.request.salt);
        for page in self.prefixes.lookup(root, &s.tokens, PAGE) {
            self.pages.share(page);
            s.pages.push(page);
        }
        s.computed = s.pages.len() * PAGE;
        s.hashed = s.pages.len();
        s.key = self.prefixes.key(root, &s.tokens[..s.computed], PAGE);
        self.stats.cached += s.computed as u64;
    }

    /// Gives a sequence pages for `tokens` tokens; false when the pool is empty.
    fn grow(&mut self, at: usize, tokens: usize) -> bool {
        let s = &mut self.sequences[at];
        while s.pages.len() < tokens.div_ceil(PAGE) {
            match self.pages.take(|page| self.prefixes.forget(page)) {
                Some(page) => s.pages.push(page),
                None => return false,
            }
        }
        true
    }

    /// Runs one step for as many sequences as fit.
    ///
    /// # Errors
    /// A device failure: no token was generated, and the step can be run again.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let plan = scheduler::plan(&self.counts(), self.pages.available(), &self.limits);
        for &at in &plan.preempt {
            self.release(at);
            self.stats.preempted += 1;
        }
        let mut work: Vec<(usize, usize)> = Vec::with_capacity(plan.work.len());
        for (at, n) in plan.work {
            self.adopt_prefix(at);
            let s = &self.sequences[at];
            let n = n.min(s.tokens.len() - s.computed);
            if self.grow(at, s.computed + n) {
                work.push((at, n));
            }
        }
        if work.is_empty() {
            return if self.busy() {
                Err(Error::Stuck { pages: self.pages.capacity() })
            } else {
                Ok(Vec::new())
            };
        }
        let stride = work.iter().map(|&(at, _)| self.sequences[at].pages.len()).max().unwrap_or(1);
        let parts: Vec<Part<'_>> = work
            .iter()
            .map(|&(at, n)| {
                let s = &self.sequences[at];
                Part { tokens: &s.tokens, computed: s.computed, n, pages: &s.pages, all_rows: false }
            })
            .collect();
        let wanted = batch::fill(&mut self.inputs, &parts, stride);
        self.runner.run(&self.inputs)?;
        self.stats.steps += 1;
        self.stats.computed += self.inputs.tokens.len() as u64;
        self.stats.widest = self.stats.widest.max(work.len());
        self.commit(&work);
        let events = self.sample(&work, &wanted)?;
        self.finish(&events);
        Ok(events)
    }

    /// Computed tokens advance, and pages that became full are remembered.
    fn commit(&mut self, work: &[(usize, usize)]) {
        for &(at, n) in work {
            let s = &mut self.sequences[at];
            s.computed += n;
            while self.options.prefix_cache && (s.hashed + 1) * PAGE <= s.computed {
                let tokens = &s.tokens[s.hashed * PAGE..(s.hashed + 1) * PAGE];
                s.key = self.prefixes.insert_after(s.key, tokens, s.pages[s.hashed]);
                s.hashed += 1;
            }
        }
    }

    /// One token for every sequence whose known tokens are all computed.
    fn sample(&mut self, work: &[(usize, usize)], wanted: &[usize]) -> Result<Vec<Event>> {
        let context = self.context();
        let vocabulary = self.runner.model().config.vocabulary;
        if wanted.iter().all(|&w| w == 0) {
            return Ok(Vec::new());
        }
        let mut rows = self.runner.output("logits")?.chunks_exact(vocabulary);
        let mut events = Vec::new();
        for (&(at, _), _) in work.iter().zip(wanted).filter(|(_, w)| **w > 0) {
            let s = &mut self.sequences[at];
            let Some(logits) = rows.next() else { break };
            let sample = match s.sampler.sample(logits, &s.tokens, s.request.logprobs) {
                Ok(sample) => sample,
                Err(e) => {
                    events.push(Event::Failed(s.id, e.to_string()));
                    continue;
                }
            };
            s.tokens.push(sample.id);
            events.push(Event::Token(
                s.id,
                TokenEvent { id: sample.id, logprob: sample.logprob, top: sample.top },
            ));
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
