//! The driver reports what it is there for, and its inputs are what their numbers say.

use ingle_tests::attack::driver::{Fault, PLANTED_AT, Planted, Target, input, run};

/// A target that panics, asks for too much or takes too long at a known input is reported at that input. Faults that
/// end the process are reported too: `xtask mutate` plants them before each of its runs.
#[test]
fn planted_faults_are_reported() {
    let found = |fault| run(Target::Planted(fault), 1, 0, |iteration| iteration < 10).1;
    assert_eq!(found(Planted::Panic), Some((PLANTED_AT, Fault::Panic("planted".into()))));
    let memory = found(Planted::Memory);
    assert!(
        matches!(memory, Some((PLANTED_AT, Fault::Memory { usage, .. })) if usage.largest == 1 << 30),
        "{memory:?}"
    );
    let slow = found(Planted::Slow);
    assert!(matches!(slow, Some((PLANTED_AT, Fault::Slow(_)))), "{slow:?}");
}

#[test]
fn an_input_is_a_function_of_its_numbers() {
    for target in Target::ALL {
        assert_eq!(input(target, 7, 3), input(target, 7, 3));
        let mut distinct: Vec<_> = (0..50).map(|i| input(target, 7, i)).collect();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > 40, "{}: {} of 50 differ", target.name(), distinct.len());
        assert_ne!(input(target, 7, 3), input(target, 8, 3));
    }
}

/// A short run of each target; a long one is `xtask mutate`.
#[test]
fn the_first_inputs_of_every_target_are_harmless() {
    for target in Target::ALL {
        let (tally, fault) = run(target, 20, 0, |iteration| iteration < 150);
        assert_eq!(fault, None, "{}", target.name());
        assert!(tally.accepted > 5 && tally.kinds.len() > 5, "{}: {tally:?}", target.name());
    }
}
