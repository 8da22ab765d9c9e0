//! Safetensors files of public reports.

use ingle_tests::attack::{driver, seeds, walk, watch};

/// A file with this header and `data` bytes of data.
fn weights(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

fn refused(bytes: &[u8], words: &[&str]) {
    let (outcome, usage) = watch::measure_here(|| walk::safetensors(bytes));
    let message = outcome.expect_err("the file must be refused");
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    // The folder's small files are read too.
    assert!(usage.peak <= super::HEADER + 4 * bytes.len(), "{message}: {usage:?}");
}

/// ztxz16/fastllm#712, ml-explore/mlx#3409 and #3363, ollama/ollama#17149, antirez/h3.c#48, 0xShug0/audio.cpp#138:
/// headers that disagree with themselves or the file.
#[test]
fn fastllm_712_headers_that_disagree() {
    let one = |shape: &str, offsets: &str, data| {
        weights(&format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#), data)
    };
    refused(&one("[16,4]", "[0,4096]", 4096), &["tensor \"w\"", "takes 256 bytes", "[0, 4096]"]);
    refused(&one("[1024,1024]", "[0,4]", 4), &["tensor \"w\"", "takes 4194304 bytes", "[0, 4]"]);
    for offsets in ["[8,0]", "[-4,4]", "[]", "[0]"] {
        refused(&one("[2]", offsets, 8), &["\"w\""]);
    }
    refused(&one("[2]", "[0,8]", 24), &["last 16 bytes", "no tensor"]);
    refused(&one("[4294967296,4294967296]", "[0,0]", 0), &["tensor \"w\"", "63 bits"]);
    let two = r#"{"v":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}"#;
    refused(&weights(two, 4), &["inside tensor"]);
    refused(&weights("[]", 0), &["an object of tensors"]);
    for len in [u64::MAX, u64::MAX - 7, 1 << 40] {
        refused(&[&len.to_le_bytes()[..], b"{}"].concat(), &["the header", &len.to_string()]);
    }
    refused(&[&3u64.to_le_bytes()[..], b"{}"].concat(), &["the header", "needs 3", "but 2 remain"]);
    refused(&0u64.to_le_bytes(), &["the header"]);
}

/// 0xShug0/audio.cpp#138: the order of names need not be that of offsets.
#[test]
fn audio_cpp_138_names_in_another_order_than_their_data() {
    let file = &seeds::folder(false)[0].1;
    let len = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&file[8..8 + len]).unwrap();
    header = header.into_iter().rev().collect();
    let reversed = serde_json::to_vec(&header).unwrap();
    let reversed = [&(reversed.len() as u64).to_le_bytes()[..], &reversed, &file[8 + len..]].concat();
    assert_ne!(&reversed, file);
    let input = vec![("model.safetensors".to_string(), reversed)];
    assert_eq!(driver::judge(driver::Target::SafeTensors, &input), Ok(Ok(())));
}
