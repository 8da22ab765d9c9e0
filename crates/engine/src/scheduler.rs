//! Who computes how many tokens in the next step. There is no prefill or decode phase: each sequence has tokens computed
//! and tokens known, and gets a share of the step's token budget. `plan` and `commit` are pure functions of counts: no
//! clock, no device, no token.
//!
//! Pages are counted for each group of layers. What a sequence holds follows from how many of its tokens are computed: the
//! pages that its next row sees.

use ingle_graph::KvGroup;

/// Limits of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most tokens in one step.
    pub tokens: usize,
    /// Most tokens of one sequence in one step.
    pub chunk: usize,
    /// Most sequences in one step.
    pub sequences: usize,
    /// Positions per page.
    pub page: usize,
    /// Groups of layers, each with pages of its own.
    pub groups: Vec<KvGroup>,
}

impl Limits {
    /// Pages of a group that a sequence with `computed` tokens holds.
    pub fn held(&self, group: usize, computed: usize) -> usize {
        let first = self.groups[group].first_visible(computed) / self.page;
        computed.div_ceil(self.page).saturating_sub(first)
    }

    /// Pages that it takes, of every group, to compute `n` tokens more.
    pub fn missing(&self, computed: usize, n: usize) -> usize {
        (computed + n).div_ceil(self.page) - computed.div_ceil(self.page)
    }

    /// Most pages of a group that a sequence holds at once on its way to `known` tokens.
    pub fn peak(&self, group: usize, known: usize) -> usize {
        self.groups[group].ring(self.chunk, known, self.page)
    }
}

/// Counts of one sequence, in order of arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Tokens whose keys and values are in the pools; 0 for a sequence that holds no page.
    pub computed: usize,
    /// Tokens known: prompt and generated.
    pub known: usize,
    /// Larger goes first.
    pub priority: i32,
}

/// What the next step does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepPlan {
    /// (index of a sequence, tokens it computes), running sequences first.
    pub work: Vec<(usize, usize)>,
    /// Sequences that give up their pages, to be computed again later, in the order they are preempted.
    pub preempt: Vec<usize>,
}

/// Plans a step for sequences listed in order of arrival, with `free` pages to take in each group.
///
/// Sequences with one token to compute (decoding) come first, then those in the middle of their prompt, then new ones;
/// within each, higher priority and earlier arrival first. So a long prompt never stalls running streams by more than
/// its chunk. When pages run out for a running sequence, the one of lowest priority and latest arrival gives up its
/// own; a new sequence only starts while there are pages for all its known tokens.
pub fn plan(sequences: &[Counts], free: &[usize], limits: &Limits) -> StepPlan {
    let mut order: Vec<usize> =
        (0..sequences.len()).filter(|&i| sequences[i].computed < sequences[i].known).collect();
    let phase = |s: &Counts| match (s.known - s.computed, s.computed) {
        (1, 1..) => 0,
        (_, 1..) => 1,
        _ => 2,
    };
    order.sort_by_key(|&i| (phase(&sequences[i]), -sequences[i].priority, i));
    // Who gives way first: lowest priority, then latest arrival.
    let mut victims: Vec<usize> = (0..sequences.len()).filter(|&i| sequences[i].computed > 0).collect();
    victims.sort_by_key(|&i| (-sequences[i].priority, i));
    let mut plan = StepPlan::default();
    let (mut free, mut budget) = (free.to_vec(), limits.tokens);
    for i in order {
        if budget == 0 || plan.work.len() == limits.sequences {
            break;
        }
        let s = sequences[i];
        if plan.preempt.contains(&i) {
            continue;
        }
        let n = (s.known - s.computed).min(limits.chunk).min(budget);
        let need = limits.missing(s.computed, n);
        let can_start = || free.iter().enumerate().all(|(group, &free)| limits.peak(group, s.known) <= free);
        if s.computed == 0 && !can_start() {
            // Wait; later arrivals of the same priority do not overtake.
            break;
        }
        let short = |free: &[usize]| free.iter().any(|&free| need > free);
        while short(&free) {
            let victim = victims.pop_if(|&mut v| {
                v != i && (sequences[v].priority, std::cmp::Reverse(v)) < (s.priority, std::cmp::Reverse(i))
            });
            let Some(victim) = victim else { break };
            let computed = sequences[victim].computed;
            let mut planned = 0;
            plan.work.retain(|&(w, n)| {
                planned += if w == victim { n } else { 0 };
                w != victim
            });
            budget += planned;
            for (group, free) in free.iter_mut().enumerate() {
                *free += limits.held(group, computed) + limits.missing(computed, planned);
            }
            plan.preempt.push(victim);
        }
        if short(&free) {
            continue;
        }
        free.iter_mut().for_each(|free| *free -= need);
        budget -= n;
        plan.work.push((i, n));
    }
    plan
}

/// Counts after the step: computed tokens advance, preempted sequences start over.
pub fn commit(sequences: &mut [Counts], plan: &StepPlan) {
    for &i in &plan.preempt {
        sequences[i].computed = 0;
    }
    for &(i, n) in &plan.work {
        sequences[i].computed += n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: KvGroup = KvGroup { window: None };
    const WINDOW: KvGroup = KvGroup { window: Some(6) };

    fn limits(groups: &[KvGroup]) -> Limits {
        Limits { tokens: 16, chunk: 8, sequences: 4, page: 4, groups: groups.to_vec() }
    }

    fn seq(computed: usize, known: usize) -> Counts {
        Counts { computed, known, priority: 0 }
    }

    #[test]
    fn plans() {
        let high = |s: Counts| Counts { priority: 1, ..s };
        type Row = (&'static str, Vec<Counts>, usize, Vec<(usize, usize)>, Vec<usize>);
        let rows: Vec<Row> = vec![
            ("nothing to do", vec![], 8, vec![], vec![]),
            ("a prompt is cut into chunks", vec![seq(0, 20)], 8, vec![(0, 8)], vec![]),
            ("decoding goes before prefill", vec![seq(0, 20), seq(9, 10)], 8, vec![(1, 1), (0, 8)], vec![]),
            ("the budget is shared", vec![seq(0, 8), seq(0, 8), seq(0, 8)], 9, vec![(0, 8), (1, 8)], vec![]),
            ("priority first", vec![seq(0, 4), high(seq(0, 4))], 1, vec![(1, 4)], vec![]),
            ("no pages, no start", vec![seq(0, 20), seq(0, 1)], 4, vec![], vec![]),
            ("the latest gives way", vec![seq(4, 5), seq(4, 5), seq(3, 4)], 1, vec![(0, 1), (1, 1)], vec![2]),
            (
                "the last one left waits rather than evict an earlier one",
                vec![seq(7, 8), seq(4, 5)],
                0,
                vec![(0, 1)],
                vec![],
            ),
            ("most sequences", vec![seq(6, 7); 6], 0, vec![(0, 1), (1, 1), (2, 1), (3, 1)], vec![]),
        ];
        for (what, sequences, free, work, preempt) in rows {
            assert_eq!(plan(&sequences, &[free], &limits(&[FULL])), StepPlan { work, preempt }, "{what}");
        }
    }

    /// Pages of 4 positions; all positions, a window of 6 and one of 1; chunks of 8.
    #[test]
    fn a_window_holds_what_its_next_row_sees() {
        let limits = limits(&[FULL, WINDOW, KvGroup { window: Some(1) }]);
        for (computed, held) in [
            (0, [0, 0, 0]),
            (3, [1, 1, 1]),
            (8, [2, 2, 0]),
            (9, [3, 2, 1]),
            (12, [3, 2, 0]),
            (13, [4, 2, 1]),
            (17, [5, 2, 1]),
            (1000, [250, 2, 0]),
        ] {
            assert_eq!([0, 1, 2].map(|group| limits.held(group, computed)), held, "{computed} tokens");
        }
        for (computed, n, missing) in [(0, 8, 2), (8, 1, 1), (9, 3, 0), (9, 4, 1), (13, 8, 2)] {
            assert_eq!(limits.missing(computed, n), missing, "{n} tokens after {computed}");
        }
        for (known, peaks) in
            [(1, [1, 1, 1]), (8, [2, 2, 2]), (12, [3, 3, 3]), (17, [5, 4, 3]), (1000, [250, 4, 3])]
        {
            assert_eq!([0, 1, 2].map(|group| limits.peak(group, known)), peaks, "{known} tokens");
        }
    }

    #[test]
    fn every_group_needs_its_pages() {
        let limits = limits(&[FULL, WINDOW]);
        type Row = (&'static str, Vec<Counts>, [usize; 2], Vec<(usize, usize)>, Vec<usize>);
        let rows: Vec<Row> = vec![
            ("a start needs the peak of each", vec![seq(0, 40)], [10, 4], vec![(0, 8)], vec![]),
            ("too few of all positions", vec![seq(0, 40)], [9, 4], vec![], vec![]),
            ("too few for the window", vec![seq(0, 40)], [10, 3], vec![], vec![]),
            ("a page of each", vec![seq(100, 101)], [1, 1], vec![(0, 1)], vec![]),
            ("none free for the window", vec![seq(100, 101)], [1, 0], vec![], vec![]),
            (
                "one gives way for the window's sake",
                vec![seq(100, 101), seq(9, 10)],
                [5, 0],
                vec![(0, 1)],
                vec![1],
            ),
        ];
        for (what, sequences, free, work, preempt) in rows {
            assert_eq!(plan(&sequences, &free, &limits), StepPlan { work, preempt }, "{what}");
        }
    }

    /// Pools that hold one long sequence finish any mix of sequences, whatever is preempted on the way.
    #[test]
    fn everybody_finishes() {
        for (groups, total) in [
            (&[FULL][..], &[12][..]),
            (&[FULL, WINDOW], &[12, 4]),
            (&[FULL, WINDOW], &[12, 7]),
            (&[WINDOW], &[4]),
        ] {
            finishes(&limits(groups), total);
        }
    }

    fn finishes(limits: &Limits, total: &[usize]) {
        let targets = [37usize, 5, 48, 12, 30];
        let mut sequences: Vec<Counts> = targets.iter().map(|&t| seq(0, t / 2 + 1)).collect();
        let mut is_done = [false; 5];
        let (mut preempted, mut together) = (0, 0);
        for _ in 0..10_000 {
            let free = |sequences: &[Counts], is_done: &[bool]| -> Vec<usize> {
                let held = |group| {
                    let open = sequences.iter().zip(is_done).filter(|(_, done)| !**done);
                    open.map(|(s, _)| limits.held(group, s.computed)).sum::<usize>()
                };
                total
                    .iter()
                    .enumerate()
                    .map(|(g, total)| total.checked_sub(held(g)).expect("overdrawn"))
                    .collect()
            };
            let open: Vec<usize> = (0..targets.len()).filter(|&i| !is_done[i]).collect();
            let mut counts: Vec<Counts> = open.iter().map(|&i| sequences[i]).collect();
            let available = free(&sequences, &is_done);
            let step = plan(&counts, &available, limits);
            assert!(open.is_empty() || !step.work.is_empty(), "stuck: {sequences:?}");
            assert!(step.work.iter().map(|w| w.1).sum::<usize>() <= limits.tokens);
            for (group, available) in available.into_iter().enumerate() {
                let given: usize = step.preempt.iter().map(|&i| limits.held(group, counts[i].computed)).sum();
                let taken: usize =
                    step.work.iter().map(|&(i, n)| limits.missing(counts[i].computed, n)).sum();
                assert!(taken <= available + given, "group {group}: {step:?} of {available} free");
            }
            (preempted, together) = (preempted + step.preempt.len(), together.max(step.work.len()));
            commit(&mut counts, &step);
            for (&i, counted) in open.iter().zip(counts) {
                sequences[i] = counted;
                let s = &mut sequences[i];
                if s.computed == s.known && s.known < targets[i] {
                    s.known += 1;
                } else if s.computed == targets[i] {
                    is_done[i] = true;
                }
            }
        }
        assert!(preempted > 0 || together == 1, "{total:?} were never too few: the test shows nothing");
        assert!(is_done.iter().all(|done| *done));
    }
}
