//! A package index: a folder of wheels, and a `pip` that copies from it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use zip::write::{SimpleFileOptions, ZipWriter};

/// The folder with the stand-in for `pip`, for PATH. It is never written, so running it cannot meet an open writer.
pub fn pip_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_pip")
}

/// Writes the wheel of `package` (version 1.0) with these members into `folder`.
pub fn write_wheel(folder: &Path, package: &str, requires: &[&str], members: &[(&str, &[u8])]) {
    let module = package.replace('-', "_");
    let mut metadata = format!("Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n");
    requires.iter().for_each(|name| metadata += &format!("Requires-Dist: {name}\n"));
    metadata += "\nRequires-Dist: this-is-prose\n";
    let metadata_name = format!("{module}-1.0.dist-info/METADATA");
    let file = File::create(folder.join(format!("{module}-1.0-py3-none-any.whl"))).expect("a new wheel");
    let mut wheel = ZipWriter::new(file);
    for (name, bytes) in members.iter().copied().chain([(&*metadata_name, metadata.as_bytes())]) {
        wheel.start_file(name, SimpleFileOptions::default()).expect("a new member");
        wheel.write_all(bytes).expect("its bytes");
    }
    wheel.finish().expect("a whole wheel");
}

/// What the stand-in for `pip` was called with, one line for each call.
pub fn pip_calls(folder: &Path) -> Vec<String> {
    fs::read_to_string(folder.join("calls")).unwrap_or_default().lines().map(String::from).collect()
}
