//! The Hugging Face hub, or a mirror of it: which files a repository has, and fetching the ones that make a model.
//!
//! `$HF_ENDPOINT` names another server than `https://huggingface.co`, `$HF_TOKEN` opens gated and private repositories.
//! The listing pins the commit and, for large files, the SHA-256; files are fetched at that commit and checked.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::cache::Room;
use super::digest::parse_sha256;
use super::error::{Error, Result};
use super::files::{self, INDEX};
use super::http::{Client, Patience, Wanted};
use super::progress::Progress;
use super::spec::HubSpec;

const ENDPOINT: &str = "https://huggingface.co";
const REVISION: &str = ".revision";

/// A hub.
#[derive(Debug)]
pub struct Hub {
    endpoint: String,
    client: Client,
}

/// One file of a repository.
#[derive(Debug, Clone, Default)]
struct Listed {
    name: String,
    bytes: Option<u64>,
    sha256: Option<String>,
}

/// What a repository holds at one commit.
struct Listing {
    revision: String,
    files: Vec<Listed>,
}

impl Hub {
    /// The hub that the environment names.
    pub fn from_env() -> Result<Self> {
        let var = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        Self::new(
            &var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into()),
            var("HF_TOKEN"),
            Patience::default(),
        )
    }

    /// The hub at `endpoint`.
    pub fn new(endpoint: &str, token: Option<String>, patience: Patience) -> Result<Self> {
        let endpoint = endpoint.trim().trim_end_matches('/').to_string();
        let client = Client::new(&endpoint, token.map(|token| token.trim().into()), patience)?;
        Ok(Hub { endpoint, client })
    }

    /// Its address.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Fetches the model that `spec` means into `room`; returns the GGUF file (of a split one the first part) or the folder.
    /// A repository with a `config.json` and safetensors is a folder unless a file is named; of several GGUF files the
    /// only one, else the only Q4_K_M, is meant.
    pub fn fetch(&self, spec: &HubSpec, room: &Room, progress: &mut dyn Progress) -> Result<PathBuf> {
        let listing = self.list(spec)?;
        let names: Vec<String> = listing.files.iter().map(|file| file.name.clone()).collect();
        let models = files::gguf_models(&names);
        let model = spec.whole().to_string();
        let offers = || models.iter().map(|files| files[0].clone()).collect();
        let wanted = match (&spec.file, files::folder_files(&names)) {
            (Some(file), _) => {
                let files = files::split_parts(file).unwrap_or_else(|| vec![file.clone()]);
                if !files.iter().all(|file| names.contains(file)) {
                    return Err(Error::NoSuchFile { model, wanted: file.clone(), offers: offers() });
                }
                files
            }
            (None, Some(first)) => return self.fetch_folder(spec, &listing, &names, first, room, progress),
            (None, None) => files::preferred_gguf(&models).map_err(|choices| match choices.is_empty() {
                true => Error::NoSuchFile {
                    model,
                    wanted: "GGUF file and no safetensors with a config.json".into(),
                    offers: Vec::new(),
                },
                false => Error::Choose { model, choices },
            })?,
        };
        for name in &wanted {
            self.fetch_file(spec, &listing, name, room, progress)?;
        }
        if spec.file.is_none() {
            room.choose(&wanted[0])?;
        }
        Ok(room.folder().join(&wanted[0]))
    }

    /// Fetches one file whose length and digest are known beforehand, without asking for a listing.
    pub fn fetch_known(
        &self,
        spec: &HubSpec,
        revision: &str,
        known: (&str, u64, &str),
        room: &Room,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        let (name, bytes, sha256) = known;
        let file = Listed { name: name.into(), bytes: Some(bytes), sha256: Some(sha256.into()) };
        let listing = Listing { revision: revision.into(), files: vec![file] };
        self.fetch_file(spec, &listing, name, room, progress)?;
        Ok(room.folder().join(name))
    }

    /// Fetches a safetensors folder: `first` (its small files, `config.json` last), and the weights before the last of them.
    fn fetch_folder(
        &self,
        spec: &HubSpec,
        listing: &Listing,
        names: &[String],
        mut first: Vec<String>,
        room: &Room,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        // Files of two commits would not fit together.
        if room.noted(REVISION) != listing.revision {
            for name in names.iter().filter(|name| !files::is_gguf(name) && files::is_safe_path(name)) {
                room.discard(&room.folder().join(name))?;
            }
            room.note(REVISION, &listing.revision)?;
        }
        let config = first.pop();
        for name in &first {
            self.fetch_file(spec, listing, name, room, progress)?;
        }
        let weights = match first.iter().any(|name| name == INDEX) {
            true => indexed_weights(&room.folder().join(INDEX))?,
            false => files::folder_weights(names),
        };
        for name in weights.iter().chain(&config) {
            self.fetch_file(spec, listing, name, room, progress)?;
        }
        room.choose(".")?;
        Ok(room.folder().to_path_buf())
    }

    /// Fetches one file, unless it is there.
    fn fetch_file(
        &self,
        spec: &HubSpec,
        listing: &Listing,
        name: &str,
        room: &Room,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let target = room.folder().join(name);
        if target.is_file() {
            return Ok(());
        }
        let known = listing.files.iter().find(|file| file.name == name).cloned().unwrap_or_default();
        let HubSpec { owner, repo, .. } = spec;
        let url = format!(
            "{}/{owner}/{repo}/resolve/{}/{}",
            self.endpoint,
            escaped(&listing.revision),
            escaped(name)
        );
        let wanted = Wanted { url, target, sha256: known.sha256.as_deref(), bytes: known.bytes };
        self.client.download(&wanted, progress)
    }

    fn list(&self, spec: &HubSpec) -> Result<Listing> {
        let url = format!("{}/api/models/{}/{}?blobs=true", self.endpoint, spec.owner, spec.repo);
        let answer = self.client.json(&url)?;
        let Some(siblings) = answer["siblings"].as_array() else {
            return Err(Error::Answer { url, why: "the listing has no 'siblings'".into() });
        };
        let listed = |file: &Value| {
            let name = file["rfilename"].as_str().filter(|name| files::is_safe_path(name))?.to_string();
            let lfs = &file["lfs"];
            let bytes = lfs["size"].as_u64().or(file["size"].as_u64());
            Some(Listed { name, bytes, sha256: lfs["sha256"].as_str().and_then(parse_sha256) })
        };
        let revision = answer["sha"].as_str().unwrap_or("main").to_string();
        Ok(Listing { revision, files: siblings.iter().filter_map(listed).collect() })
    }
}

/// The weight files that the index at `path` names, sorted.
fn indexed_weights(path: &Path) -> Result<Vec<String>> {
    let bad = |why: String| Error::Answer { url: path.display().to_string(), why };
    let text = fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let index: Value = serde_json::from_slice(&text).map_err(|e| bad(format!("not JSON: {e}")))?;
    let map = index["weight_map"].as_object().ok_or_else(|| bad("it has no 'weight_map'".into()))?;
    let plain = |(tensor, file): (&String, &Value)| match file {
        Value::String(name) => Ok(name.clone()),
        _ => Err(bad(format!("weight_map: tensor {tensor:?} is in {file}, not a file name"))),
    };
    let mut weights = map.iter().map(plain).collect::<Result<Vec<String>>>()?;
    weights.sort();
    weights.dedup();
    match weights.iter().find(|file| !files::is_safe_path(file)) {
        Some(file) => Err(bad(format!("it names '{file}', which is not a file of the folder"))),
        None => Ok(weights),
    }
}

/// `path` for use in an address: all but letters, digits, `-._~` and `/` percent-encoded.
fn escaped(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    path.bytes().map(|b| if is_plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests;
