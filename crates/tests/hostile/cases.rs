//! The map from public reports to tests names only tests that are there.

use std::path::Path;

#[test]
fn every_test_of_the_map_is_in_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let map = std::fs::read_to_string(root.join("docs/public-cases.md")).expect("the map is there");
    let mut tests = 0;
    let mut entries = Vec::new();
    for line in map.lines().filter(|line| line.starts_with("| ")) {
        entries.extend(line[2..].split(' ').next().and_then(|n| n.parse::<u32>().ok()));
        for place in line.split('`').filter(|part| part.contains(".rs::")) {
            let (file, name) = place.split_once("::").expect("a file and a function");
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
            assert!(text.contains(&format!("fn {name}(")), "{file} has no test {name}");
            tests += 1;
        }
    }
    assert!(entries.is_sorted() && entries.len() >= 40, "{entries:?}");
    assert!(tests >= 40, "{tests} tests");
}
