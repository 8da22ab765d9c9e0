//! Who computes how many tokens in the next step. There is no prefill or decode phase: each sequence has tokens computed
//! and tokens known, and gets a share of the step's token budget. `plan` and `commit` are pure functions of counts: no
//! clock, no device, no token.

/// Limits of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most tokens in one step.
    pub tokens: usize,
    /// Most tokens of one sequence in one step.
    pub chunk: usize,
    /// Most sequences in one step.
    pub sequences: usize,
    /// Positions per page.
    pub page: usize,
}

/// Counts of one sequence, in order of arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Tokens whose keys and values are in the pool.
    pub computed: usize,
    /// Tokens known: prompt and generated.
    pub known: usize,
    /// Pages held.
    pub pages: usize,
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

/// Plans a step for sequences listed in order of arrival, with `free` pages to take.
///
/// Sequences with one token to compute (decoding) come first, then those in the middle of their prompt, then new ones;
/// within each, higher priority and earlier arrival first. So a long prompt never stalls running streams by more than
/// its chunk. When pages run out for a running sequence, the one of lowest priority and latest arrival gives up its
/// own; a new sequence only starts while there are pages for all its known tokens.
pub fn plan(sequences: &[Counts], free: usize, limits: &Limits) -> StepPlan {
    let mut order: Vec<usize> =
        (0..sequences.len()).filter(|&i| sequences[i].computed < sequences[i].known).collect();
    let phase = |s: &Counts| match (s.known - s.computed, s.pages) {
        (1, 1..) => 0,
        (_, 1..) => 1,
        _ => 2,
    };
    order.sort_by_key(|&i| (phase(&sequences[i]), -sequences[i].priority, i));
    // Who gives way first: lowest priority, then latest arrival.
    let mut victims: Vec<usize> = (0..sequences.len()).filter(|&i| sequences[i].pages > 0).collect();
    victims.sort_by_key(|&i| (-sequences[i].priority, i));
    let mut plan = StepPlan::default();
    let (mut free, mut budget) = (free, limits.tokens);
    for i in order {
        if budget == 0 || plan.work.len() == limits.sequences {
            break;
        }
        let s = sequences[i];
        if plan.preempt.contains(&i) {
            continue;
        }
        let n = (s.known - s.computed).min(limits.chunk).min(budget);
        let missing = |tokens: usize| tokens.div_ceil(limits.page).saturating_sub(s.pages);
        let need = missing(s.computed + n);
        if s.pages == 0 && missing(s.known) > free {
            // Wait; later arrivals of the same priority do not overtake.
            break;
        }
        while need > free {
            let victim = victims.pop_if(|&mut v| {
                v != i && (sequences[v].priority, std::cmp::Reverse(v)) < (s.priority, std::cmp::Reverse(i))
            });
            let Some(victim) = victim else { break };
            plan.work.retain(|&(w, n)| {
                let keep = w != victim;
                if !keep {
                    budget += n;
                    free +=
                        (sequences[w].computed + n).div_ceil(limits.page).saturating_sub(sequences[w].pages);
                }
                keep
            });
            free += sequences[victim].pages;
            plan.preempt.push(victim);
        }
        if need > free {
            continue;
        }
        free -= need;
        budget -= n;
        plan.work.push((i, n));
    }
    plan
}

/// Counts after the step: computed tokens advance, preempted sequences start over.
pub fn commit(sequences: &mut [Counts], plan: &StepPlan, limits: &Limits) {
    for &i in &plan.preempt {
        sequences[i] = Counts { computed: 0, pages: 0, ..sequences[i] };
    }
    for &(i, n) in &plan.work {
        let s = &mut sequences[i];
        s.computed += n;
        s.pages = s.pages.max(s.computed.div_ceil(limits.page));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { tokens: 16, chunk: 8, sequences: 4, page: 4 };

    fn seq(computed: usize, known: usize, pages: usize) -> Counts {
        Counts { computed, known, pages, priority: 0 }
    }

    #[test]
    fn plans() {
        let high = |s: Counts| Counts { priority: 1, ..s };
        type Row = (&'static str, Vec<Counts>, usize, Vec<(usize, usize)>, Vec<usize>);
        let rows: Vec<Row> = vec![
            ("nothing to do", vec![], 8, vec![], vec![]),
            ("a prompt is cut into chunks", vec![seq(0, 20, 0)], 8, vec![(0, 8)], vec![]),
            (
                "decoding goes before prefill",
                vec![seq(0, 20, 0), seq(9, 10, 3)],
                8,
                vec![(1, 1), (0, 8)],
                vec![],
            ),
            (
                "the budget is shared",
                vec![seq(0, 8, 0), seq(0, 8, 0), seq(0, 8, 0)],
                9,
                vec![(0, 8), (1, 8)],
                vec![],
            ),
            ("priority first", vec![seq(0, 4, 0), high(seq(0, 4, 0))], 1, vec![(1, 4)], vec![]),
            ("no pages, no start", vec![seq(0, 20, 0), seq(0, 1, 0)], 4, vec![], vec![]),
            (
                "the latest gives way",
                vec![seq(4, 5, 1), seq(4, 5, 1), seq(3, 4, 1)],
                1,
                vec![(0, 1), (1, 1)],
                vec![2],
            ),
            (
                "the last one left waits rather than evict an earlier one",
                vec![seq(7, 8, 2), seq(4, 5, 1)],
                0,
                vec![(0, 1)],
                vec![],
            ),
            ("most sequences", vec![seq(4, 5, 2); 6], 0, vec![(0, 1), (1, 1), (2, 1), (3, 1)], vec![]),
        ];
        for (what, sequences, free, work, preempt) in rows {
            assert_eq!(plan(&sequences, free, &LIMITS), StepPlan { work, preempt }, "{what}");
        }
    }

    /// A pool that holds one long sequence finishes any mix of sequences, whatever is preempted on the way.
    #[test]
    fn everybody_finishes() {
        let total = 12;
        let targets = [37usize, 5, 48, 12, 30];
        let mut sequences: Vec<Counts> = targets.iter().map(|&t| seq(0, t / 2 + 1, 0)).collect();
        let mut preempted = 0;
        for _ in 0..10_000 {
            let held: usize = sequences.iter().map(|s| s.pages).sum();
            assert!(held <= total);
            let step = plan(&sequences, total - held, &LIMITS);
            let open = sequences.iter().zip(targets).any(|(s, t)| s.computed < t);
            assert!(!open || !step.work.is_empty(), "stuck: {sequences:?}");
            assert!(step.work.iter().map(|w| w.1).sum::<usize>() <= LIMITS.tokens);
            preempted += step.preempt.len();
            commit(&mut sequences, &step, &LIMITS);
            for (s, t) in sequences.iter_mut().zip(targets) {
                if s.computed == s.known && s.known < t {
                    s.known += 1;
                } else if s.computed == t {
                    s.pages = 0;
                }
            }
        }
        assert!(preempted > 0, "the pool was never too small: the test shows nothing");
        assert!(sequences.iter().zip(targets).all(|(s, t)| s.computed == t));
    }
}
