"""Throwaway: what groups of features, labels and late decisions gain (CONFIG [EPOCHS OUT] FOLDER)."""
import sys, time, json, statistics
from dataclasses import replace
from pathlib import Path
import torch, logging, warnings
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
from pipelines.config import load_config
from pipelines.data.recorded import load_traces, samplings_of, timed
from pipelines.latency.stage import load_profile
from pipelines.train.fitting import fitted, module_of
from pipelines.train import judging
from pipelines.train.judging import timed_cases, statics, judge
from selector.train.tuning import replay_setting, tune_lookup_rule, tune_setting
from selector.train.replay import ratio_of_speeds
from selector.train.data import Timed
from selector.schema import LOG
import mlflow
cfgpath, epochs, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
config = load_config(Path(cfgpath), [f"train.epochs={epochs}"])
names = LOG.names
import re
def match(*pats): return [n for n in names if any(re.fullmatch(p,n) for p in pats)]
G = {
 "match":   match("match","copied","match_steady","match_in_prompt"),
 "copied_mean": match("copied_mean_.*"),
 "after_match": match("after_match_predicted","after_match_copied_.*"),
 "second":  match("second_match","second_agrees","third_agrees"),
 "ngrams":  match("seen_[1-4]","agree_.*"),
 "new":     match("new_mean_.*"),
 "by_match":match("right_by_match","length_by_match"),
 "tokens":  match("(last|two|match|next|copy)_(accepted|copied|known)"),
 "hit_mean": match("hit_mean_.*","hits"),
 "hit_after_match": match("after_match_hit.*"),
 "hit_ngrams": match("hit_after_.*","seen_after"),
 "hit_of": match("hits_of_.*"),
 "hit_key": match("hit_(accepted|copied|known)"),
}
covered=sum(G.values(),[]); print("not in groups:", [n for n in names if n not in covered], flush=True)
profile = load_profile(config)
splits = load_traces(config)
train = timed_cases(config, splits["train"], profile)[:1]
validation = timed_cases(config, splits["validation"], profile)[:1]
test = timed_cases(config, splits["test"], profile)[:1]
bases = statics(train)
rule = tune_lookup_rule(train[0], bases[0])
free = replace(profile.at_batch(1), decide={k: 0.0 for k in profile.at_batch(1).decide})
charged=profile.at_batch(1)
print("decide", charged.decide, flush=True)
rule_test = {"free": replay_setting(test[0].on(free), {}, rule), "charged": replay_setting(test[0], {}, rule)}
done = [json.loads(l) for l in out.read_text().splitlines()] if out.exists() else []
def run(name, dropped):
    if any(d["name"]==name for d in done): return
    t=time.time()
    masked=[n for g in dropped for n in G[g]]
    rows=[]
    for seed in (0,1):
        cfg = config.model_copy(update={"seed": seed})
        module = module_of(cfg,"regressor","drafter",splits["train"])
        module._body.unseen = [*module._body.unseen, *[LOG.index(n) for n in masked]]
        with mlflow.start_run(run_name=name) as r:
            # load_from_checkpoint restores buffers (scale inf) so masks persist
            module = fitted(cfg, module, splits, cfg.train.verifier, [], Path(f"{sys.argv[-1]}/{name}-{seed}"), r.info.run_id)
        entry={}
        for levels,level in module.ways:
            for how,prof in (("free",free),("charged",charged)):
                val=validation[0].on(prof); tst=test[0].on(prof)
                pred={l: module.scores(val.texts,l) for l in levels}
                j=tune_setting(val,pred,replace(bases[0],level=level))
                predt={l: module.scores(tst.texts,l) for l in levels}
                rep=replay_setting(tst,predt,j.setting)
                ratio=ratio_of_speeds(rep, rule_test[how], tst.texts.source_number_X)
                entry[f"{level} {how}"]=(ratio.value, ratio.error)
                kinds=sorted(set(tst.texts.kind_X))
                for k in kinds:
                    m=torch.tensor([x==k for x in tst.texts.kind_X])
                    s=(rep.tokens_X[m].sum()/rep.seconds_X[m].sum())/(rule_test[how].tokens_X[m].sum()/rule_test[how].seconds_X[m].sum())
                    entry[f"{level} {how} {k}"]=(float(s),0)
        rows.append(entry)
    mean={k: statistics.fmean(r[k][0] for r in rows) for k in rows[0]}
    err={k: rows[0][k][1] for k in rows[0]}
    rec={"name":name,"dropped":dropped,"mean":mean,"err":err,"rows":[{k:v[0] for k,v in r.items()} for r in rows],"s":time.time()-t}
    with out.open("a") as f: f.write(json.dumps(rec)+"\n")
    print(name, {k: round(v,4) for k,v in mean.items() if len(k.split())==2}, f"{rec['s']:.0f}s", flush=True)
run("all",[])
for g in G: run("without "+g,[g])
TEXTG=["match","copied_mean","after_match","second","ngrams","new","by_match","tokens"]
HITG=["hit_mean","hit_after_match","hit_ngrams","hit_of","hit_key"]
def only(text, hit): 
    keep=text.split()+hit.split()
    run("only "+" ".join(keep), [g for g in G if g not in keep])
only("match copied_mean after_match second ngrams tokens","hit_mean hit_after_match hit_ngrams hit_of hit_key")
only("match ngrams tokens","hit_mean hit_ngrams hit_key")
only("match copied_mean tokens","hit_mean hit_after_match hit_key")
only("match copied_mean ngrams tokens","hit_mean hit_after_match")
only("match tokens","hit_mean hit_key")
only("match copied_mean second tokens","hit_mean hit_ngrams")
only("match copied_mean second ngrams tokens","hit_mean hit_ngrams hit_key")
only("match ngrams second tokens","hit_mean hit_after_match hit_ngrams")
only("match","hit_mean")
only("tokens","hit_key")
only("match copied_mean after_match second ngrams","hit_mean hit_ngrams")
only("match copied_mean second ngrams tokens","hit_mean hit_after_match hit_ngrams hit_of hit_key")
only("match copied_mean after_match ngrams tokens","hit_mean hit_after_match hit_ngrams hit_of hit_key")
only("match copied_mean after_match second ngrams tokens","hit_mean hit_after_match hit_key")
only("match copied_mean after_match second ngrams tokens","hit_after_match hit_ngrams hit_key")
only("match copied_mean after_match second ngrams tokens","hit_after_match hit_ngrams")
only("match second ngrams tokens","hit_mean hit_ngrams")
only("match copied_mean second tokens","hit_mean hit_after_match hit_ngrams")
only("match copied_mean after_match second tokens","hit_mean hit_ngrams")
only("match copied_mean by_match second tokens","hit_mean hit_ngrams")
only("match second tokens","hit_mean hit_ngrams")
