//! One file over HTTP, as often as it takes: quick to give up on a server that is not there, patient with one that
//! sends, and able to go on where an earlier attempt broke off.
//!
//! Bytes arrive in `FILE.part`; what the server said about them (ETag and length) lies in `FILE.part.json`. An attempt
//! that finds a part asks for the rest with `Range`, and with `If-Range` where the ETag is a strong one, so a file that
//! has changed meanwhile comes whole and replaces the part. The SHA-256, where one is promised, has the last word.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use ureq::http::{HeaderMap, Response, Uri, header};
use ureq::{Agent, Body, Timeout};

use super::cache::{part_paths, publish, remove_if_there};
use super::digest::{Hasher, parse_sha256};
use super::error::{Error, Result};
use super::progress::Progress;

/// Redirects followed before an address is given up.
const REDIRECTS_MAX: usize = 10;
/// Attempts in a row that may end without a single new byte.
const BARREN_ATTEMPTS_MAX: usize = 3;
/// Longest answer read as JSON.
const JSON_BYTES_MAX: u64 = 64 << 20;

/// How long to wait for what.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the host's name, and again for a connection.
    pub connect: Duration,
    /// For the head of an answer.
    pub answer: Duration,
    /// For the next bytes of its body.
    pub stall: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Patience { connect: seconds(3), answer: seconds(10), stall: seconds(30) }
    }
}

/// Asks servers; sends its token to one of them only.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    patience: Patience,
    token: Option<(Origin, String)>,
}

/// What to download, and what is known about it.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Its address.
    pub url: String,
    /// Where it goes.
    pub target: PathBuf,
    /// Its digest, lower-case hexadecimal.
    pub sha256: Option<&'a str>,
    /// Its length.
    pub bytes: Option<u64>,
}

/// Scheme, host and port: who gets to see a token.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Origin(String, String, u16);

/// The last answer after redirects, and what the first server said about the file on the way.
struct Answer {
    response: Response<Body>,
    sha256: Option<String>,
    bytes: Option<u64>,
    token_sent: bool,
}

/// How an attempt ended that may be followed by another.
enum End {
    /// All bytes are here.
    Complete,
    /// The connection broke off.
    Cut(String),
    /// What is on disk does not fit what the server has; nothing is left of it.
    Mismatch,
}

impl Client {
    /// A client that shows `token` to the server at `endpoint` and to no other.
    pub fn new(endpoint: &str, token: Option<String>, patience: Patience) -> Result<Self> {
        let agent = Agent::config_builder()
            .user_agent(concat!("ingle/", env!("CARGO_PKG_VERSION")))
            // A file cut off in the middle of a compressed stream could not be gone on with.
            .accept_encoding("identity")
            .http_status_as_error(false)
            // Redirects are followed here, where the token's origin is known.
            .max_redirects(0)
            .timeout_resolve(Some(patience.connect))
            .timeout_connect(Some(patience.connect))
            .timeout_recv_response(Some(patience.answer))
            .timeout_per_read(Some(patience.stall))
            .build()
            .new_agent();
        let origin = Origin::of(endpoint)?;
        Ok(Client { agent, patience, token: token.map(|token| (origin, token)) })
    }

    /// The JSON at `url`.
    pub fn json(&self, url: &str) -> Result<Value> {
        let Answer { response, token_sent, .. } = self.get(url, &[])?;
        if response.status() != 200 {
            return Err(refusal(url, response.status().as_u16(), token_sent));
        }
        let text = response.into_body().into_with_config().limit(JSON_BYTES_MAX).read_to_vec();
        let text = text.map_err(|e| self.failure(url, e))?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::Answer { url: url.into(), why: format!("not JSON: {e}") })
    }

    /// Downloads one file. On return it is at `wanted.target`, complete, checked and flushed to disk. After a network
    /// error the bytes so far are kept for the next call; after any other error nothing is left behind.
    pub fn download(&self, wanted: &Wanted<'_>, progress: &mut dyn Progress) -> Result<()> {
        let mut part = Part::open(&wanted.target)?;
        match self.complete(wanted, &mut part, progress) {
            Err(Error::Network { url, why, .. }) => Err(Error::Network { url, why, bytes_kept: part.bytes }),
            Err(error @ (Error::Unauthorized { .. } | Error::Status { .. })) => Err(error),
            Err(error) => {
                // The first error is the one to report.
                let _ = part.delete();
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    fn complete(&self, wanted: &Wanted<'_>, part: &mut Part, progress: &mut dyn Progress) -> Result<()> {
        let name = file_name(&wanted.target);
        let mut sha256 = wanted.sha256.map(String::from);
        let mut barren_attempts = 0;
        // A file joined from several attempts that fails its checksum gets one more chance, in one piece.
        let mut is_joined = part.bytes > 0;
        let mut was_restarted = false;
        loop {
            let bytes_before = part.bytes;
            let end = self.attempt(wanted, part, &mut sha256, progress);
            progress.finish();
            match end? {
                End::Complete => {
                    let found = part.hasher.clone().hex();
                    match &sha256 {
                        Some(expected) if *expected != found => {
                            if !is_joined || was_restarted {
                                return Err(Error::Checksum {
                                    file: name,
                                    expected: expected.clone(),
                                    found,
                                });
                            }
                            progress
                                .note(&format!("{name}: the part kept from before was bad; starting again"));
                            part.restart(None, None)?;
                            was_restarted = true;
                        }
                        _ => return publish(part.file()?, &part.path, &wanted.target),
                    }
                }
                End::Cut(why) => {
                    is_joined = true;
                    barren_attempts = if part.bytes > bytes_before { 0 } else { barren_attempts + 1 };
                    if barren_attempts == BARREN_ATTEMPTS_MAX {
                        return Err(network(&wanted.url, why));
                    }
                }
                End::Mismatch => {
                    barren_attempts += 1;
                    if barren_attempts == BARREN_ATTEMPTS_MAX {
                        let why = "its answers about the file's length do not agree".into();
                        return Err(Error::Answer { url: wanted.url.clone(), why });
                    }
                }
            }
        }
    }

    /// One request for what is missing.
    fn attempt(
        &self,
        wanted: &Wanted<'_>,
        part: &mut Part,
        sha256: &mut Option<String>,
        progress: &mut dyn Progress,
    ) -> Result<End> {
        let url = &wanted.url;
        let is_too_long = wanted.bytes.is_some_and(|total| part.bytes > total);
        if part.bytes > 0 && (is_too_long || (part.etag.is_none() && sha256.is_none())) {
            part.restart(None, None)?;
        }
        if sha256.is_some() && part.bytes > 0 && wanted.bytes == Some(part.bytes) {
            return Ok(End::Complete);
        }
        let mut headers = Vec::new();
        if part.bytes > 0 {
            headers.push((header::RANGE, format!("bytes={}-", part.bytes)));
            headers.extend(part.etag.iter().map(|etag| (header::IF_RANGE, etag.clone())));
        }
        let answer = self.get(url, &headers)?;
        match (&*sha256, answer.sha256) {
            (Some(expected), Some(offered)) if *expected != offered => {
                let why = format!("it offers a file with SHA-256 {offered} where {expected} is wanted");
                return Err(Error::Answer { url: url.clone(), why });
            }
            (None, offered) => *sha256 = offered,
            _ => {}
        }
        let check_length = |found: Option<u64>| match (wanted.bytes, found) {
            (Some(expected), Some(found)) if expected != found => {
                Err(Error::Length { file: file_name(&wanted.target), expected, found })
            }
            _ => Ok(()),
        };
        check_length(answer.bytes)?;
        let head = answer.response.headers();
        let etag = strong_etag(head);
        let total = match answer.response.status().as_u16() {
            206 => {
                let (start, total) = content_range(head).unwrap_or((None, None));
                let is_same = total.is_none() || part.total.is_none() || total == part.total;
                let is_same = is_same && (etag.is_none() || part.etag.is_none() || etag == part.etag);
                if start != Some(part.bytes) || part.bytes == 0 || !is_same {
                    part.restart(None, None)?;
                    return Ok(End::Mismatch);
                }
                total.or(part.total)
            }
            200 => {
                let total = content_length(head);
                part.restart(etag, total)?;
                total
            }
            416 if part.bytes > 0 => {
                let total = content_range(head).and_then(|(_, total)| total);
                if sha256.is_some() && total == Some(part.bytes) {
                    return Ok(End::Complete);
                }
                part.restart(None, None)?;
                return Ok(End::Mismatch);
            }
            status => return Err(refusal(url, status, answer.token_sent)),
        };
        let total = total.or(answer.bytes).or(wanted.bytes);
        check_length(total)?;
        progress.start(&file_name(&wanted.target), part.bytes, total);
        self.receive(url, answer.response, part, total, progress)
    }

    /// Appends the body to the part.
    fn receive(
        &self,
        url: &str,
        response: Response<Body>,
        part: &mut Part,
        total: Option<u64>,
        progress: &mut dyn Progress,
    ) -> Result<End> {
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; super::CHUNK_BYTES];
        loop {
            let n = match body.read(&mut buffer) {
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => match ureq::Error::from(error) {
                    ureq::Error::Timeout(_) => {
                        let why = format!("nothing arrived for {:?}", self.patience.stall);
                        return Err(network(url, why));
                    }
                    error => return Ok(End::Cut(format!("the transfer broke off: {}", error))),
                },
            };
            if n == 0 {
                break;
            }
            part.append(&buffer[..n])?;
            progress.advance(n as u64);
        }
        match total {
            Some(total) if part.bytes < total => {
                Ok(End::Cut(format!("the transfer ended {} bytes early", total - part.bytes)))
            }
            Some(total) if part.bytes > total => {
                part.restart(None, None)?;
                Ok(End::Mismatch)
            }
            _ => Ok(End::Complete),
        }
    }

    /// The answer at the end of the redirects that start at `url`.
    fn get(&self, url: &str, headers: &[(header::HeaderName, String)]) -> Result<Answer> {
        let mut at = url.to_string();
        let (mut sha256, mut bytes) = (None, None);
        for _ in 0..=REDIRECTS_MAX {
            let token =
                self.token.as_ref().filter(|(origin, _)| Origin::of(&at).is_ok_and(|at| at == *origin));
            let mut request = self.agent.get(&at);
            for (name, value) in headers {
                request = request.header(name, value);
            }
            if let Some((_, token)) = token {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| self.failure(&at, e))?;
            let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            // The hub tells digest and length of a large file where it redirects to the host that stores it.
            sha256 = sha256.or_else(|| parse_sha256(text("x-linked-etag")?.trim_matches('"')));
            bytes = bytes.or_else(|| text("x-linked-size")?.parse().ok());
            match (response.status().as_u16(), text("location")) {
                (301 | 302 | 303 | 307 | 308, Some(location)) => at = redirected(&at, location)?,
                _ => return Ok(Answer { token_sent: token.is_some(), response, sha256, bytes }),
            }
        }
        Err(Error::Answer { url: url.into(), why: format!("more than {REDIRECTS_MAX} redirects") })
    }

    /// What kept an answer from coming. Where not even a connection came about, the server is to blame and not the file.
    fn failure(&self, url: &str, error: ureq::Error) -> Error {
        let Patience { connect, answer, stall } = self.patience;
        let server = || url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
        match error {
            ureq::Error::HostNotFound => network(&server(), "no such host".into()),
            ureq::Error::Io(error) => network(&server(), error.to_string()),
            ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => {
                network(&server(), format!("no connection within {connect:?}"))
            }
            ureq::Error::Timeout(Timeout::RecvResponse) => {
                network(url, format!("no answer within {answer:?}"))
            }
            ureq::Error::Timeout(_) => network(url, format!("nothing arrived for {stall:?}")),
            other => network(url, other.to_string()),
        }
    }
}

impl Origin {
    fn of(url: &str) -> Result<Self> {
        let bad = |why: String| Error::Answer { url: url.into(), why };
        let uri: Uri = url.parse().map_err(|e| bad(format!("not an address: {e}")))?;
        let (scheme, host) = (uri.scheme_str().unwrap_or_default(), uri.host().unwrap_or_default());
        let port = match scheme {
            "http" => 80,
            "https" => 443,
            _ => return Err(bad("an address starts with https:// or http://".into())),
        };
        Ok(Origin(scheme.into(), host.to_ascii_lowercase(), uri.port_u16().unwrap_or(port)))
    }
}

/// An unfinished download on disk.
struct Part {
    path: PathBuf,
    state_path: PathBuf,
    file: Option<File>,
    bytes: u64,
    hasher: Hasher,
    /// A strong ETag, fit for `If-Range`.
    etag: Option<String>,
    /// Length of the whole file.
    total: Option<u64>,
}

impl Part {
    /// What an earlier attempt left of `target`, possibly nothing.
    fn open(target: &Path) -> Result<Self> {
        let [path, state_path] = part_paths(target);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        }
        let state: Value = fs::read(&state_path)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        let mut part = Part {
            etag: state["etag"].as_str().map(String::from),
            total: state["bytes"].as_u64(),
            file: None,
            bytes: 0,
            hasher: Hasher::default(),
            path,
            state_path,
        };
        if part.path.is_file() {
            let mut file = File::options()
                .read(true)
                .append(true)
                .open(&part.path)
                .map_err(|e| Error::io("open", &part.path, e))?;
            part.bytes = part.hasher.update_from(&mut file).map_err(|e| Error::io("read", &part.path, e))?;
            part.file = Some(file);
        }
        Ok(part)
    }

    /// Forgets the bytes so far; those to come belong to the file with this ETag and length.
    fn restart(&mut self, etag: Option<String>, total: Option<u64>) -> Result<()> {
        // In this order: a part that is not empty always belongs to the state beside it.
        let file = File::create(&self.path).map_err(|e| Error::io("create", &self.path, e))?;
        let state = json!({ "etag": etag, "bytes": total }).to_string();
        (self.file, self.bytes, self.hasher, self.etag, self.total) =
            (Some(file), 0, Hasher::default(), etag, total);
        fs::write(&self.state_path, state).map_err(|e| Error::io("write", &self.state_path, e))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file()?.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn file(&self) -> Result<&File> {
        let missing = || Error::io("write", &self.path, io::ErrorKind::NotFound.into());
        self.file.as_ref().ok_or_else(missing)
    }

    fn delete(&mut self) -> Result<()> {
        self.file = None;
        [&self.path, &self.state_path].into_iter().try_for_each(|path| remove_if_there(path))
    }
}

fn network(url: &str, why: String) -> Error {
    Error::Network { url: url.into(), why, bytes_kept: 0 }
}

/// What a status that brings no file means.
fn refusal(url: &str, status: u16, token_sent: bool) -> Error {
    match status {
        401 | 403 => Error::Unauthorized { url: url.into(), status, token_sent },
        _ => Error::Status { url: url.into(), status },
    }
}

/// The address that `location` means, seen from `from`.
fn redirected(from: &str, location: &str) -> Result<String> {
    let uri: Uri =
        from.parse().map_err(|e| Error::Answer { url: from.into(), why: format!("not an address: {e}") })?;
    let scheme = uri.scheme_str().unwrap_or("https");
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let to = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_string()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let folder = uri.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    match scheme == "https" && to.starts_with("http://") {
        true => Err(Error::Answer {
            url: from.into(),
            why: "it redirects from https to http, which is refused".into(),
        }),
        false => Ok(to),
    }
}

/// First byte and total of `Content-Range: bytes 7-9/10` or `bytes */10`.
fn content_range(headers: &HeaderMap) -> Option<(Option<u64>, Option<u64>)> {
    let (range, total) =
        headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?.split_once('/')?;
    let start = range.split_once('-').and_then(|(start, _)| start.trim().parse().ok());
    Some((start, total.trim().parse().ok()))
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The ETag, unless it is a weak one: those say nothing about single bytes.
fn strong_etag(headers: &HeaderMap) -> Option<String> {
    headers.get(header::ETAG)?.to_str().ok().filter(|etag| etag.starts_with('"')).map(String::from)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_joined() {
        let rows = [
            ("https://cdn.example/x?y=1", "https://cdn.example/x?y=1"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("/x", "https://hub.example:8443/x"),
            ("x", "https://hub.example:8443/a/x"),
        ];
        for (location, expected) in rows {
            assert_eq!(redirected("https://hub.example:8443/a/b?c", location).unwrap(), expected);
        }
        let error = redirected("https://hub.example/a", "http://hub.example/a").unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }

    #[test]
    fn origins_compare_with_their_default_port() {
        let origin = |url| Origin::of(url).unwrap();
        assert_eq!(origin("https://HUB.example/a"), origin("https://hub.example:443"));
        assert_ne!(origin("https://hub.example"), origin("http://hub.example"));
        assert_ne!(origin("https://hub.example"), origin("https://hub.example:8443"));
        assert!(Origin::of("ftp://hub.example").is_err());
        assert!(Origin::of("hub.example").is_err());
    }

    #[test]
    fn content_ranges() {
        let rows = [
            ("bytes 7-9/10", Some((Some(7), Some(10)))),
            ("bytes 7-9/*", Some((Some(7), None))),
            ("bytes */10", Some((None, Some(10)))),
            ("items 1-2/3", None),
        ];
        for (text, expected) in rows {
            let headers = HeaderMap::from_iter([(header::CONTENT_RANGE, text.parse().unwrap())]);
            assert_eq!(content_range(&headers), expected, "{text}");
        }
    }
}
