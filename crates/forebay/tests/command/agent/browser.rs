//! Headless Chromium, by the DevTools protocol over a pair of pipes: JSON texts that end in a zero byte.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// For an answer.
const TIME: Duration = Duration::from_secs(60);

/// A browser with one page.
pub(super) struct Browser {
    child: Child,
    commands: File,
    answers: Receiver<Value>,
    session: String,
    number: u64,
    /// What happened besides answers.
    pub(super) events: Vec<Value>,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Browser {
    /// Starts one; `None` where there is none.
    pub(super) fn start(folder: &Path) -> Option<Self> {
        let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
        let path = std::env::var_os("PATH")?;
        let found = std::env::split_paths(&path)
            .flat_map(|folder| names.map(|name| folder.join(name)))
            .find(|path| path.is_file())?;
        let (to, from) = (folder.join("to"), folder.join("from"));
        let made = Command::new("mkfifo").args([&to, &from]).status().unwrap();
        assert!(made.success());
        let profile = folder.join("profile");
        let arguments = format!(
            "exec '{}' --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
             --no-first-run --hide-scrollbars --remote-debugging-pipe --user-data-dir='{}' \
             about:blank 3<'{}' 4>'{}'",
            found.display(),
            profile.display(),
            to.display(),
            from.display()
        );
        let child = Command::new("sh").args(["-c", &arguments]).stderr(Stdio::null()).spawn();
        let child = child.unwrap();
        let commands = File::options().write(true).open(&to).unwrap();
        let reader = BufReader::new(File::open(&from).unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for text in reader.split(0) {
                let Ok(text) = text else { return };
                if sender.send(serde_json::from_slice(&text).unwrap()).is_err() {
                    return;
                }
            }
        });
        let events = Vec::new();
        let mut browser =
            Self { child, commands, answers, session: String::new(), number: 0, events };
        let page = browser.ask("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": page["targetId"], "flatten": true});
        let session = browser.ask("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Log", "Runtime", "Network"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        // Those of the tests are signed by nobody.
        browser.ask("Security.setIgnoreCertificateErrors", json!({"ignore": true}));
        Some(browser)
    }

    /// Calls a method, and waits for its result.
    pub(super) fn ask(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut call = json!({"id": self.number, "method": method, "params": params});
        if !self.session.is_empty() {
            call["sessionId"] = json!(self.session);
        }
        self.commands.write_all(format!("{call}\0").as_bytes()).unwrap();
        loop {
            let answer = self.answers.recv_timeout(TIME).unwrap();
            if answer["id"] == self.number {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// A screen of that width, in CSS pixels, light or dark.
    pub(super) fn screen(&mut self, width: u32, height: u32, mobile: bool, dark: bool) {
        let scale = if mobile { 2 } else { 1 };
        let size = json!({"width": width, "height": height, "deviceScaleFactor": scale,
                          "mobile": mobile});
        self.ask("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let feature = json!({"name": "prefers-color-scheme", "value": scheme});
        self.ask("Emulation.setEmulatedMedia", json!({"features": [feature]}));
    }

    /// Goes to a page, and waits until it is there.
    pub(super) fn open(&mut self, url: &str) {
        self.events.clear();
        let went = self.ask("Page.navigate", json!({"url": url}));
        assert!(went["errorText"].is_null(), "{went}");
        self.wait("document.readyState === 'complete'");
    }

    /// Waits until an expression is true.
    pub(super) fn wait(&mut self, expression: &str) {
        let start = Instant::now();
        while self.value(expression) != json!(true) {
            assert!(start.elapsed() < TIME, "never: {expression}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What an expression gives.
    pub(super) fn value(&mut self, expression: &str) -> Value {
        let call = json!({"expression": expression, "returnByValue": true});
        let answer = self.ask("Runtime.evaluate", call);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// A picture of the whole page, as PNG.
    pub(super) fn picture(&mut self) -> Vec<u8> {
        let how = json!({"format": "png", "captureBeyondViewport": true});
        let answer = self.ask("Page.captureScreenshot", how);
        base64(answer["data"].as_str().unwrap())
    }
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|&digit| digit == byte));
    let (mut bits, mut count, mut bytes) = (0_usize, 0, Vec::new());
    for digit in digits {
        bits = (bits << 6 | digit) & 0xffff;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
