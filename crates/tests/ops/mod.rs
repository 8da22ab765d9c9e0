//! The op case table: ops x formats x odd shapes x rows 1, 2, 7, 64, each run on the scalar reference and on every path
//! of every device, compared as bits. One table serves every backend.

mod cases;
mod harness;

use ingle_graph::reference::Interpreter;

use crate::devices;
use cases::{Case, cases};
use harness::{Difference, Rig, bits_equal};

/// Runs every case on every path and returns (cases run, failures).
fn run(filter: impl Fn(&Case) -> bool) -> (usize, Vec<String>) {
    let mut failures = Vec::new();
    let mut count = 0;
    let all: Vec<Case> = cases().into_iter().filter(filter).collect();
    for case in &all {
        let rig = Rig::new(case);
        let want = rig.run(Box::new(Interpreter::new()));
        for device in devices() {
            let Some(backend) = device.open() else { continue };
            count += 1;
            let got = rig.run(backend);
            if let Some(Difference { at, got, want, .. }) = bits_equal(&got, &want) {
                failures.push(format!(
                    "{case} on {device}: {at}: {got:e} ({:08x}), reference {want:e} ({:08x})",
                    got.to_bits(),
                    want.to_bits()
                ));
            }
        }
    }
    let absent: Vec<String> =
        devices().into_iter().filter(|d| d.open().is_none()).map(|d| d.to_string()).collect();
    println!(
        "{count} runs of {} cases; not run, missing on this machine: {}",
        all.len(),
        match absent.len() {
            0 => "none".to_string(),
            n => format!("{n} paths ({})", absent.join(", ")),
        }
    );
    (count, failures)
}

fn check(filter: impl Fn(&Case) -> bool) {
    let (count, failures) = run(filter);
    assert!(count > 0, "no case ran");
    assert!(failures.is_empty(), "{} of {count} differ:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn linear_bits() {
    check(|c| matches!(c, Case::Linear { .. }));
}

#[test]
fn attention_bits() {
    check(|c| matches!(c, Case::Attention { .. }));
}

#[test]
fn other_ops_bits() {
    check(|c| !matches!(c, Case::Linear { .. } | Case::Attention { .. }));
}

/// The comparison sees a single bit, and a difference of one ULP in one input reaches the outputs of a float op.
#[test]
fn one_ulp_is_seen() {
    for case in cases().iter().filter(|c| c.rows() == 7) {
        let rig = Rig::new(case);
        let want = rig.run(Box::new(Interpreter::new()));
        let mut got = want.clone();
        let Some(x) = got.iter_mut().flat_map(|o| o.iter_mut()).rev().find(|x| x.is_finite() && **x != 0.0)
        else {
            panic!("{case}: no finite output");
        };
        *x = f32::from_bits(x.to_bits() ^ 1);
        assert!(bits_equal(&got, &want).is_some(), "{case}");
        assert!(bits_equal(&want, &want).is_none(), "{case}");
    }
    let zero = vec![vec![0.0f32]];
    let minus = vec![vec![-0.0f32]];
    assert!(bits_equal(&zero, &minus).is_some(), "+0 and -0 differ");
    let nan = vec![vec![f32::from_bits(0x7FC0_0001)]];
    let other = vec![vec![f32::from_bits(0xFFC0_0000)]];
    assert!(bits_equal(&nan, &other).is_none(), "NaN payloads are outside the contract");
}
